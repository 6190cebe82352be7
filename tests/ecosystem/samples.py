"""Checkpoints of several kinds, each with its bundle and reference vectors.

The reference is sentence-transformers with PyTorch on the checkpoint, not the bundle.
"""

import csv
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from ecosystem.tools import RERANKER, Reranker
from odd_models import OddModel
from references import TEXTS

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Kind:
    """A random checkpoint: architecture, tokenizer (a folder in tests/data/tokenizers) and pooling."""

    model: OddModel
    tokenizer: str
    pooling: str
    normalize: bool


# Padding ids 0 and 1, with and without token types. None has a special_tokens_map.json.
KINDS = {
    "roberta": Kind(OddModel("Roberta", {"type_vocab_size": 1}), "byte-level", "cls", normalize=False),
    "xlm-roberta": Kind(OddModel("XLMRoberta", {"type_vocab_size": 1}), "unigram", "mean", normalize=False),
    "distilbert": Kind(
        OddModel("DistilBert", {"dim": 96, "n_layers": 2, "n_heads": 3, "hidden_dim": 160}),
        "wordpiece",
        "mean",
        normalize=True,
    ),
}
MAX_TOKENS = 60  # below the maximum of each model, as chosen by publishers


@dataclass(frozen=True)
class Sample:
    """A checkpoint with its bundle."""

    checkpoint: Path
    bundle: Path
    pooling: str
    normalize: bool

    @cached_property
    def oracle(self) -> Any:
        return SentenceTransformer(str(self.checkpoint), device="cpu")

    @cached_property
    def texts(self) -> list[str]:
        """Batches of mixed lengths. The longest passage exceeds the limit of every encoder."""
        lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        passages = [json.loads(line)["text"] for line in lines]
        return [*TEXTS, *passages[::140], max(passages, key=len), "The last is a short one."]

    @cached_property
    def vectors(self) -> npt.NDArray[np.float32]:
        """Shape (texts, hidden_size)."""
        vectors: npt.NDArray[np.float32] = self.oracle.encode(self.texts, batch_size=8)
        return vectors

    @cached_property
    def is_cut(self) -> npt.NDArray[np.bool_]:
        """Whether each text exceeds the bundle's token limit, shape (texts,)."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.checkpoint)
        lengths = [len(tokenizer(text, verbose=False)["input_ids"]) for text in self.texts]
        return np.array(lengths) > int(self.oracle.max_seq_length)

    def attentions(self, texts: list[str]) -> list[npt.NDArray[np.float32]]:
        """Attention weights of each layer, (texts, heads, tokens, tokens)."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.checkpoint)
        model = transformers.AutoModel.from_pretrained(self.checkpoint, attn_implementation="eager")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs, output_attentions=True)
        return [layer.numpy() for layer in outputs.attentions]


def draw(kind: Kind, directory: Path) -> Sample:
    """Write a random checkpoint in the sentence-transformers layout and export it."""
    checkpoint = directory / "checkpoint"
    kind.model.make().save_pretrained(checkpoint)
    shutil.copytree(DATA / "tokenizers" / kind.tokenizer, checkpoint, dirs_exist_ok=True)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write(checkpoint / "modules.json", [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(modules[: 3 if kind.normalize else 2])
    ])  # fmt: skip
    write(checkpoint / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})
    (checkpoint / "1_Pooling").mkdir()
    write(
        checkpoint / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 96, "pooling_mode": kind.pooling},
    )
    bundle = directory / "bundle"
    export_bundle(checkpoint, bundle, ExportOptions(grid=small_grid(40)))  # parity is tested elsewhere
    return Sample(checkpoint, bundle, kind.pooling, kind.normalize)


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def draw_reranker(checkpoint: Path, directory: Path) -> Reranker:
    """Export a trained reranker. The reference is sentence-transformers with PyTorch on the checkpoint."""
    bundle = directory / RERANKER
    export_bundle(checkpoint, bundle, ExportOptions(grid=small_grid(32), faithfulness=False))
    rows = (DATA / "stsb-en-dev.csv").read_text("utf-8").splitlines()
    pairs = [(first, second) for first, second, _ in csv.reader(rows[:40])]
    logits = CrossEncoder(str(checkpoint), device="cpu").predict(pairs, activation_fn=torch.nn.Identity())
    return Reranker(bundle, pairs, [float(logit) for logit in logits])
