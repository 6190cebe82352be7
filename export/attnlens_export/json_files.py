"""Reading and writing small JSON files."""

import json
import math
from pathlib import Path
from typing import Any

from attnlens_export.errors import SourceError


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON values
    """Read a JSON file.

    Raises:
        SourceError: The file can't be read or is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} can't be read as JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Returns an empty object if the file does not exist.

    Raises:
        SourceError: The file can't be read, is not valid JSON, or does not contain an object.
    """
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise SourceError(f"{path} contains a {type(content).__name__} instead of an object")
    return content


def write_json(path: Path, content: object) -> None:
    """Write indented JSON. Creates the directory if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finite(value: Any) -> Any:  # noqa: ANN401 - JSON values
    """Return JSON values with None instead of NaN and infinity, which JSON does not support."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
