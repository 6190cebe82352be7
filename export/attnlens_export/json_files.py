"""Reading and writing small JSON files."""

import json
import math
from pathlib import Path
from typing import Any

from attnlens_export.errors import SourceError


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Parse a JSON file.

    Raises:
        SourceError: it can't be read or parsed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} can't be read as JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; an absent file is an empty object.

    Raises:
        SourceError: it can't be parsed or holds something else.
    """
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds a {type(content).__name__} where an object is expected")
    return content


def write_json(path: Path, content: object) -> None:
    """Write indented JSON, making the directory if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finite(value: Any) -> Any:  # noqa: ANN401 - JSON values
    """Return JSON values with None for each NaN or infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
