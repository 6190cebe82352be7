"""Validation of real outputs against docs/schemas/, without undocumented keys."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


def schema(name: str) -> dict[str, Any]:
    content = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(content)
    return dict(content)


def conforms(name: str, output: str | bytes, others: Collection[str] = ()) -> dict[str, Any]:
    """Return a JSON object that conforms to the schema `name`. `others` are keys of the user's input line."""
    value = json.loads(output, parse_constant=_refuse)
    described = schema(name)
    errors = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(described).iter_errors(value)
    ]
    assert errors == []
    assert set(value) - set(described["properties"]) == set(others)
    return dict(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
