"""The choice between `tokenizer.json` and transformers, from the export to those who read the bundle."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from attnlens.bundle import BundleError, read_manifest, write_manifest
from attnlens_cli.show.model import model_table
from attnlens_client.core.models import model_info
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.claims import check_claims
from attnlens_export.parity.grid import small_grid
from attnlens_model import read_config
from attnlens_server.config import ServerConfig
from attnlens_server.served_model import ServedModel
from attnlens_server.text import TextEncoder
from published_layouts import cls_without_trimming, edit

SHOWN = "token ids of transformers, not those of the checkpoint's tokenizer.json, which differ"
TEXTS = ["a <pad> b", "<pad>", "One <pad><pad> two,three<pad>four </s>.", "<mask> and <s>"]


def export(directory: Path, *, differs: bool, choice: Any, comparison: bool = False) -> Path:
    source = directory / "source"
    cls_without_trimming(source)
    if differs:
        edit(source / "tokenizer_config.json", add_prefix_space=True)
    options = ExportOptions(grid=small_grid(16), faithfulness=False, comparison=comparison, tokenizer=choice)
    export_bundle(source, directory / "bundle", options)
    return directory / "bundle"


def shown(bundle: Path) -> tuple[str, str, str]:
    """Return the choice and the line of `attnlens info`, and the line of the viewer."""
    served = ServedModel(ServerConfig(bundle=bundle))
    info = model_info(served.methods._describer.model())
    rows = dict(zip(*(column._cells for column in model_table(info, "here").columns), strict=True))
    return info.tokenizer_choice, rows.get("tokenizer", ""), served.model.comparison


def test_choice_is_shown_and_special_tokens_in_texts_are_those_of_transformers(tmp_path: Path) -> None:
    bundle = export(tmp_path, differs=True, choice="transformers")
    choice, line, comparison = shown(bundle)
    assert (choice, line) == ("transformers", SHOWN)
    assert comparison.endswith(f"; {SHOWN}")
    manifest = read_manifest(bundle)
    manifest.tokenizer_choice = "published"
    write_manifest(bundle, manifest)
    with pytest.raises(BundleError, match="tokenizer_choice is 'published', but 'transformers' according to"):
        check_claims(bundle, manifest, read_config(bundle / "config.json"))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "source")
    encoder = TextEncoder(bundle / "tokenizer.json", 32)
    for text, encoded in zip(TEXTS, encoder.encode([(text,) for text in TEXTS]), strict=True):
        assert encoded.input_ids.tolist() == reference(text)["input_ids"]
        assert ("<pad>" in text) == (reference.pad_token_id in encoded.input_ids)


@pytest.mark.parametrize("choice", ["transformers", "published"])
def test_option_without_an_effect_is_not_shown(choice: str, tmp_path: Path) -> None:
    bundle = export(tmp_path, differs=False, choice=choice, comparison=True)
    *entries, comparison = shown(bundle)
    assert entries == ["", ""]
    assert "token ids of" not in comparison
    results = [figure.result for figure in read_manifest(bundle).publisher.figures]
    assert ("token ids" in results) == (choice == "transformers")
