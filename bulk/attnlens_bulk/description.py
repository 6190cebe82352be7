"""`run.json`: inputs, model and options of a run, which together determine its output."""

import json
from collections.abc import Mapping
from typing import Any

from attnlens_bulk.errors import ResumeError
from attnlens_client import ModelInfo

FORMAT_VERSION = 1
RUN_FILE = "run.json"
_SHOWN_CHARS = 400  # of a value in a message
_SECTIONS = (("model", "model's"), ("options", "option"), ("vectors", "vectors'"))
_DEFAULTS = {"id_column": None, "vectors": "embeddings", "empty": "embed", "truncate": False}
_TYPES = {"dtype": "float32", "embedding_type": "float"}


def resolve_options(options: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Return options of a run with the defaults of the model, so that equal runs have equal options."""
    result = {**_DEFAULTS, **options}
    for name, default in _TYPES.items():
        result[name] = default if result.get(name) is None else result[name]
    prompt_name = result.pop("prompt_name", None)
    if result.get("prompt") is None:
        name = info.default_prompt_name if prompt_name is None else prompt_name
        result["prompt"] = info.prompts.get(name, "") if isinstance(name, str) else name
    dimensions, normalize = result.pop("dimensions", None), result.pop("normalize", None)
    pooling = result.pop("pooling", None)
    if result["vectors"] == "tokens":
        return result
    # Default embeddings are normalized before components are cut off, others after that.
    is_cut_last = not dimensions and normalize is None and info.embedding_size < info.max_dimensions
    normalizes = info.normalize if normalize is None else normalize
    return result | {
        "pooling": info.pooling if pooling is None else pooling,
        "dimensions": dimensions or info.embedding_size,
        "normalize": "before truncation" if normalizes and is_cut_last else normalizes,
    }


def parse_description(content: bytes, output: str) -> dict[str, Any]:
    """Return the content of `run.json`.

    Raises:
        ResumeError: It is invalid.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _invalid(output, f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _invalid(output, "it is not an object")
    version = found.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ResumeError(
            f"{output} has format version {_shown(version)}, but this version writes {FORMAT_VERSION}: use "
            "another directory"
        )
    for section, _ in _SECTIONS:
        if not isinstance(found.get(section), dict):
            raise _invalid(output, f"{section!r} is not an object")
    inputs = found.get("inputs")
    if not isinstance(inputs, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("file"), str) for entry in inputs
    ):
        raise _invalid(output, "'inputs' is not a list of files")
    return found


def check_same(found: dict[str, Any], expected: dict[str, Any], info: ModelInfo, output: str) -> None:
    """Compare the contents of `run.json`.

    Raises:
        ResumeError: They differ. The message names the first difference.
    """
    remedy = f"restore it and repeat the command, or start a new run in another directory than {output}"
    found = found | {"options": resolve_options(found["options"], info)}
    for section, noun in _SECTIONS:
        for name in expected[section] | found[section]:
            before, now = found[section].get(name), expected[section].get(name)
            is_unknown = (
                name in ("max_tokens", "similarity") and name not in found[section]
            )  # an older version
            if before != now and not is_unknown:
                raise ResumeError(
                    f"the {noun} {_printable(name)} was {_shown(before)} and is {_shown(now)}: {remedy}"
                )
    before_files = {entry["file"]: entry for entry in found["inputs"]}
    now_files = {entry["file"]: entry for entry in expected["inputs"]}
    for name in before_files.keys() - now_files.keys():
        raise ResumeError(f"the input {_printable(name)} of the run is missing: {remedy}")
    for name in now_files.keys() - before_files.keys():
        raise ResumeError(f"the input {name} is new: {remedy}")
    if list(before_files) != list(now_files):
        raise ResumeError(f"the inputs have another order: {remedy}")
    for name, entry in now_files.items():
        _check_same_file(name, before_files[name], entry, remedy)


def _check_same_file(name: str, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    for key in ("format", "size_bytes", "sha256", "sha256_of"):
        if before.get(key) != now[key]:
            raise ResumeError(
                f"the input {name} has changed: its {key} was {_printable(before.get(key))}, now {now[key]}: "
                f"{remedy}"
            )
    if before["sha256_of"] != "content" and before.get("modified") != now["modified"]:
        raise ResumeError(
            f"the input {name} may have changed: its time of change was "
            f"{_printable(before.get('modified'))}, now {now['modified']}, and only its head and tail were "
            f"compared: {remedy}"
        )


def _invalid(output: str, reason: str) -> ResumeError:
    return ResumeError(
        f"{output}/{RUN_FILE} does not describe a run: {reason}. Restore it, or use another directory"
    )


def _shown(value: Any) -> str:  # noqa: ANN401 - parsed JSON
    try:
        return _shortened(repr(value))
    except RecursionError:
        return "a nested value"


def _printable(value: Any) -> str:  # noqa: ANN401 - parsed JSON
    return _shortened(str(value).encode("utf-8", "backslashreplace").decode())


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
