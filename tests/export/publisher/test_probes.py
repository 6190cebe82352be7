"""The texts that are compared with a publisher's pipeline: their lengths."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from attnlens_publisher.process import LIBRARIES, call
from odd_models import OddModel
from published_layouts import edit, save
from small_bundles import ONE_LAYER

LIMIT, VECTOR_LIMIT = 400, 300
LONG = ONE_LAYER | {"max_position_embeddings": LIMIT}
TEXTS = ["The engineers read the report.", "A query about engineers"]
CROSS_ENCODER = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


def compute(source: Path, kind: str, *, takes_pairs: bool) -> list[tuple[Any, bool, int]]:
    """Return the text or pair of each probe, whether it has vectors, and its number of tokens."""
    edit(source / "tokenizer_config.json", model_max_length=LIMIT)
    output = source / "results.npz"
    described = call(
        "attnlens_publisher.reference:compute",
        max_bytes=4 * 10**9,
        imports=LIBRARIES,
        source=str(source),
        kind=kind,
        texts=TEXTS,
        max_tokens=LIMIT,
        vector_tokens=VECTOR_LIMIT,
        prompts={},
        default_prompt=None,
        num_global_tokens=None,
        takes_pairs=takes_pairs,
        output=str(output),
    )
    with np.load(output) as arrays:
        return [
            (probe["text"], probe["has_vectors"], len(arrays[f"{index}.ids"]))
            for index, probe in enumerate(described["probes"])
        ]


@pytest.fixture
def count(tmp_path: Path) -> Callable[[str], int]:
    """Counts the tokens of a text without a limit."""

    def count_tokens(text: str) -> int:
        content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
        return len(Tokenizer.from_str(json.dumps(content | {"truncation": None})).encode(text).ids)

    return count_tokens


def test_texts_have_the_length_of_each_limit(tmp_path: Path, count: Callable[[str], int]) -> None:
    save(OddModel("Bert", LONG), tmp_path, "wordpiece")
    probes = compute(tmp_path, "embedder", takes_pairs=False)
    lengths = sorted((count(text), length) for text, _, length in probes)[-4:]
    longest_word = max(count(word) for text in TEXTS for word in text.split())
    assert [min(full, LIMIT) for full, _ in lengths] == [length for _, length in lengths]
    (vectors, _), (longest, _), (beyond, _), (twice, _) = lengths
    assert VECTOR_LIMIT - longest_word < vectors <= VECTOR_LIMIT
    assert longest <= LIMIT < beyond <= longest + longest_word
    assert twice > 1.8 * LIMIT
    assert max(length for _, has_vectors, length in probes if has_vectors) == vectors


def test_either_text_of_a_pair_is_too_long(tmp_path: Path, count: Callable[[str], int]) -> None:
    save(OddModel("Bert", LONG | {"num_labels": 1}), tmp_path, "wordpiece", "ForSequenceClassification")
    edit(tmp_path / "config.json", **CROSS_ENCODER)
    probes = compute(tmp_path, "scorer", takes_pairs=True)
    cut = {tuple(count(part) > LIMIT for part in pair) for pair, _, length in probes if length == LIMIT}
    assert cut == {(True, False), (False, True), (True, True)}
