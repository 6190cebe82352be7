"""Write the tables of json_output.md from the files in schemas/: `make docs`. A test compares them."""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "json_output.md"
BLOCK = re.compile(r"(<!-- (\w+)\.json -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the page with one table per schema."""
    return BLOCK.sub(lambda found: found[1] + table(found[2]) + found[3], PAGE.read_text(encoding="utf-8"))


def table(name: str) -> str:
    """Return a row per key of the schema `name` and of its nested objects."""
    schema = json.loads((DOCS / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    rows = ["| key | description |", "|---|---|"]
    for key, value in schema["properties"].items():
        always = "" if key in schema["required"] else " (optional)"
        rows.append(f"| `{key}` | {_cell(value)}{always} |")
        for inner, described in value.get("properties", {}).items():
            if "description" in described:
                rows.append(f"| `{key}.{inner}` | {_cell(described)} |")
    return "\n".join(rows)


def _cell(value: dict[str, Any]) -> str:
    return str(value["description"]).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
