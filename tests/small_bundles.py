"""Small encoders with random weights, exported with the tokenizers of tests/data/tokenizers."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odd_models import OddModel

if TYPE_CHECKING:
    from attnlens_export.graph.trace import TracedGraph

TOKENIZERS = Path(__file__).parent / "data" / "tokenizers"
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 34}
CLASSIFIERS = {
    "reranker": ("wordpiece", OddModel("Bert", ONE_LAYER | {"num_labels": 1})),
    "byte-level reranker": (
        "byte-level",
        OddModel("Roberta", ONE_LAYER | {"type_vocab_size": 1, "num_labels": 1}),
    ),
    "topics": (
        "wordpiece",
        OddModel("Bert", ONE_LAYER | {"id2label": dict(enumerate(["art", "law", "sea"]))}),
    ),
}
MODELS = {
    "wordpiece": OddModel("Bert", ONE_LAYER),
    "byte-level": OddModel("Roberta", ONE_LAYER | {"type_vocab_size": 1}),
    "unigram": OddModel("XLMRoberta", ONE_LAYER | {"type_vocab_size": 1}),
}


def copy_without_json(kind: str, source: Path) -> None:
    """Copy a tokenizer's files without tokenizer.json."""
    shutil.copytree(TOKENIZERS / kind, source, ignore=lambda *_: ["tokenizer.json"], dirs_exist_ok=True)


@functools.cache
def _traced(kind: str) -> "TracedGraph":
    """Return the traced graph of `MODELS[kind]`, with reproducible weights."""
    from attnlens_export.graph.trace import trace  # noqa: PLC0415 - imports torch
    from attnlens_model import load_checkpoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        MODELS[kind].make().save_pretrained(directory)
        checkpoint = load_checkpoint(directory)
    return trace(checkpoint.encoder, checkpoint.config)


def export_classifier(name: str, directory: Path, **options: Any) -> Path:
    """Export `CLASSIFIERS[name]` from `directory / "source"`, and return the bundle.

    `options` are passed to `ExportOptions`.
    """
    from attnlens_export import ExportOptions, export_bundle  # noqa: PLC0415 - imports torch
    from attnlens_export.parity.grid import small_grid  # noqa: PLC0415

    tokenizer, model = CLASSIFIERS[name]
    model.make("ForSequenceClassification").save_pretrained(directory / "source")
    _copy_tokenizer(tokenizer, directory / "source")
    usual: dict[str, Any] = {"faithfulness": False, "comparison": False, "name": name}
    chosen = ExportOptions(grid=small_grid(32), **usual | options)
    export_bundle(directory / "source", directory / "bundle", chosen)
    return directory / "bundle"


def _copy_tokenizer(kind: str, source: Path) -> None:
    shutil.copytree(TOKENIZERS / kind, source, dirs_exist_ok=True)
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 34}))


def export_small(kind: str, directory: Path, **options: Any) -> Path:
    """Export `MODELS[kind]` with its built tokenizer and return the bundle.

    `options` are passed to `ExportOptions`. By default, faithfulness is not measured.
    """
    from attnlens_export import ExportOptions, export_bundle  # noqa: PLC0415 - imports torch
    from attnlens_export.parity.grid import small_grid  # noqa: PLC0415

    MODELS[kind].make().save_pretrained(directory / "source")
    copy_without_json(kind, directory / "source")
    path = directory / "source" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 34}))
    usual: dict[str, Any] = {"faithfulness": False, "comparison": False, "pooling": "mean"}
    chosen = ExportOptions(grid=small_grid(32), tracer=lambda *_: _traced(kind), **usual | options)
    summary = export_bundle(directory / "source", directory / "bundle", chosen)
    assert ", built from " in summary.decisions[-1]
    return directory / "bundle"
