"""docs/configuration.md: every key, with its default, and examples that can be exported."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnlens.bundle import read_manifest
from attnlens_cli.commands.export import export
from attnlens_model import EncoderConfig
from attnlens_model.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
ROWS = {
    cells[0].strip("`"): cells
    for cells in (re.split(r" (?<!\\)\| ?", line[2:]) for line in PAGE.splitlines() if line.startswith("| `"))
}


def test_every_key_is_there_with_its_default() -> None:
    fields = dataclasses.fields(EncoderConfig)
    assert list(ROWS) == [field.name for field in fields]
    for field in fields:
        default = "" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        assert ROWS[field.name][2].strip() == default, field.name
    for name in FAMILIES:
        assert re.search(rf"\b{name}\b", ROWS["family"][3])


@pytest.mark.parametrize("example", EXAMPLES, ids=["bert", "modernbert"])
def test_an_example_is_exported(example: str, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text(example, encoding="utf-8")
    arguments = ["--config", "my.json", "--output", "bundle", "--seed", "0", "--parity-tokens", "16"]
    arguments = [str(tmp_path / each) if each in {"my.json", "bundle"} else each for each in arguments]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    config = EncoderConfig.from_json(example)
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest.parity.passed
    assert (manifest.model_name, manifest.architecture.family) == ("my", config.family)
    assert EncoderConfig.from_json((tmp_path / "bundle" / "config.json").read_text("utf-8")) == config
