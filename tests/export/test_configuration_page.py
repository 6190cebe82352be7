"""docs/configuration.md: every key, with its default, and examples that can be exported."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnlens.bundle import read_manifest
from attnlens_cli.commands.bundles.export import export
from attnlens_model import AttentionConfig, EncoderConfig
from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.config_part import ConfigPart, field_types, join, parts_in
from attnlens_model.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def rows(section: str) -> dict[str, list[str]]:
    """The cells of a table by its first column."""
    lines = [line[2:] for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in (re.split(r" (?<!\\)\| ?", line) for line in lines)}


def keys(part: type[ConfigPart]) -> dict[str, str]:
    """The path of every key of a part, and its default as JSON. Attention has tables of its own."""
    found = {}
    for field in dataclasses.fields(part):
        [inner] = [*parts_in(field_types(part)[field.name]), None][:1]
        path = join(part.path, field.name)
        if inner is None or field.default is None or inner is AttentionConfig:
            is_required = field.default is dataclasses.MISSING
            found[path] = "" if is_required else f"`{json.dumps(field.default)}`"
        if inner is not None and inner is not AttentionConfig:
            found |= keys(inner)
    return found


def test_every_key_is_there_with_its_default() -> None:
    [table] = [rows(section) for section in SECTIONS if section.startswith("Keys")]
    assert {path: cells[2].strip() for path, cells in table.items()} == keys(EncoderConfig)
    for name in FAMILIES:
        assert re.search(rf"\b{name}\b", table["family"][3])


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_every_key_of_a_kind_of_attention_is_there_with_its_default(kind: str) -> None:
    [table] = [rows(section) for section in SECTIONS if section.startswith(f'Attention of the kind "{kind}"')]
    assert {path: cells[2].strip() for path, cells in table.items()} == keys(ATTENTION_KINDS[kind])


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
