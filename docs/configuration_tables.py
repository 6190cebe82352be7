"""Write the tables of configuration.md from the configuration classes: `make docs`. A test compares them."""

import dataclasses
import inspect
import json
import re
import types
import typing
from pathlib import Path

from attnlens_model import AttentionConfig, EncoderConfig
from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.config_part import ConfigPart, field_types, join, parts_in
from attnlens_model.families import FAMILIES

PAGE = Path(__file__).parent / "configuration.md"
BLOCK = re.compile(r"(<!-- (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
_ATTRIBUTES = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def page() -> str:
    """Return the page with the table of `EncoderConfig` and one table per attention mechanism."""
    parts: dict[str, type[ConfigPart]] = {"encoder": EncoderConfig, **ATTENTION_KINDS}
    return BLOCK.sub(
        lambda found: found[1] + "\n".join(_table(parts[found[2]])) + found[3],
        PAGE.read_text(encoding="utf-8"),
    )


def _table(part: type[ConfigPart]) -> list[str]:
    return ["| key | type | default | meaning |", "|---|---|---|---|", *_rows(part)]


def _rows(part: type[ConfigPart]) -> list[str]:
    """Return a row per key of a part and of its nested parts. Attention has tables of its own."""
    rows = []
    meanings = _attributes(part)
    for field in dataclasses.fields(part):
        hint = field_types(part)[field.name]
        inner = next(iter(parts_in(hint)), None)
        path = join(part.path, field.name)
        if inner is None or field.default is None or inner is AttentionConfig:
            is_required = field.default is dataclasses.MISSING
            default = "" if is_required else f"`{json.dumps(field.default)}`"
            meaning = meanings[field.name]
            if path == "family":
                meaning = (
                    f"Family of checkpoints, which determines tensor names: {', '.join(sorted(FAMILIES))}."
                )
            elif path == "attention.kind":
                meaning = "Mechanism. Required in the file."
            rows.append(f"| `{path}` | {_json_type(hint)} | {default} | {_escaped(meaning)} |")
        if inner is not None and inner is not AttentionConfig:
            rows += _rows(inner)
    return rows


def _attributes(part: type[ConfigPart]) -> dict[str, str]:
    """Return the descriptions of the attributes of a class and its bases, from their docstrings."""
    found: dict[str, str] = {}
    for base in reversed(part.__mro__):
        section = _ATTRIBUTES.search(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        if section:
            found |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(section[1])}
    return found


def _json_type(hint: object) -> str:
    """Return the JSON types of a type hint, such as "integer or null"."""
    if typing.get_origin(hint) is typing.Literal:
        return "string"
    kinds = typing.get_args(hint) or (hint,)
    names = [_JSON_TYPES.get(kind, "object") if isinstance(kind, type) else "array" for kind in kinds]
    return " or ".join(dict.fromkeys(names))


def _escaped(text: str) -> str:
    """Return a docstring as the text of a cell, in JSON terms."""
    for name, value in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{name}\b", value, text)
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
