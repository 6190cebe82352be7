"""docs/configuration.md: every key, with its default, and examples that can be exported."""

import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnlens.bundle import read_manifest
from attnlens_cli.commands.bundles.export import export
from attnlens_model import EncoderConfig
from attnlens_model.attention.kinds import ATTENTION_KINDS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_tables_match_the_configuration_classes() -> None:
    assert runpy.run_path(str(DOCS / "configuration_tables.py"))["page"]() == PAGE
    assert set(re.findall(r"<!-- (\w+) -->", PAGE)) == {"encoder", "end", *ATTENTION_KINDS}


@pytest.mark.parametrize("example", EXAMPLES, ids=["bert", "modernbert"])
def test_example_is_exported(example: str, tmp_path: Path) -> None:
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
