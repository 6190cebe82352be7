"""Ranges of quantized embeddings: measured as a server embeds, and limited by the size of the model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import attnlens_server
from attnlens.bundle import read_manifest
from attnlens.tensors import from_tensor
from attnlens_export import embedding_ranges
from attnlens_export.embedding_ranges import measure_ranges
from attnlens_export.int8.texts import read_kinds
from attnlens_export.progress import no_stage_progress
from attnlens_model import read_config


def test_ranges_are_those_of_served_embeddings(small_bundle: Callable[[str], Path]) -> None:
    bundle = small_bundle("wordpiece")
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.enable_truncation(embedding_ranges.MAX_TEXT_TOKENS)
    whole = [text for texts in read_kinds(None).values() for text in texts]
    texts = [encoding.ids for encoding in tokenizer.encode_batch(whole)]
    assert max(map(len, texts)) == embedding_ranges.MAX_TEXT_TOKENS
    with attnlens_server.local(bundle, threads=1) as model:
        served = model.embed(texts, truncate=True)
        quantized = model.embed_with_usage(texts, truncate=True, embedding_type="uint8")
    ranges = from_tensor(read_manifest(bundle).embedding_ranges.values)
    np.testing.assert_allclose(ranges, [served.min(axis=0), served.max(axis=0)], atol=1e-6)
    np.testing.assert_array_equal(quantized.ranges, ranges)
    assert {0, 127, 254} <= {*np.unique(quantized.vectors).tolist()}


def test_large_model_is_measured_on_fewer_texts_or_not_at_all(
    small_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = small_bundle("wordpiece")
    config = read_config(bundle / "config.json")
    whole = measure_ranges(bundle, config, no_stage_progress)
    monkeypatch.setattr(embedding_ranges, "_MAX_FLOPS", 4e8)
    part = measure_ranges(bundle, config, no_stage_progress)
    assert whole is not None
    assert part is not None
    assert (whole.num_texts, 100 <= part.num_texts < 1000) == (1253, True)
    assert (from_tensor(part.values)[0] >= from_tensor(whole.values)[0] - 1e-6).all()
    monkeypatch.setattr(embedding_ranges, "_MAX_FLOPS", 1e6)
    assert measure_ranges(bundle, config, no_stage_progress) is None


def test_bundle_without_a_tokenizer_has_no_ranges(tmp_path: Path) -> None:
    config = read_config(Path(__file__).parents[1] / "data" / "bundle" / "config.json")
    assert measure_ranges(tmp_path, config, no_stage_progress) is None
