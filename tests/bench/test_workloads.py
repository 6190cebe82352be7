"""Benchmark texts: truncated up front, and disjoint from the calibration texts."""

from pathlib import Path

import pytest
import tokenizers

from bench.setting import QUICK
from bench.workloads import CALIBRATION_TEXTS, CUT_TOKENS, LONG_TOKENS, SHORT_TOKENS, Corpus, Workload


@pytest.fixture(scope="module")
def corpus(minilm_dir: Path) -> Corpus:
    return Corpus(minilm_dir)


@pytest.fixture(scope="module")
def workloads(corpus: Corpus) -> list[Workload]:
    return [getattr(corpus, name)(size) for name, size in QUICK.items()]


def test_workload_lengths_match_the_untruncated_token_counts(
    workloads: list[Workload], minilm_dir: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limits = {"short": (1, SHORT_TOKENS), "long": LONG_TOKENS}
    for workload in workloads:
        assert len(workload.texts) == QUICK[workload.name]
        assert workload.lengths == [len(encoding) for encoding in tokenizer.encode_batch(workload.texts)]
        minimum, maximum = limits.get(workload.name, (1, CUT_TOKENS))
        assert minimum - 5 <= min(workload.lengths)  # truncation inside a word may drop a few more tokens
        assert max(workload.lengths) <= maximum


def test_calibration_texts_are_not_measured(corpus: Corpus, workloads: list[Workload]) -> None:
    assert len(set(corpus.calibration)) == CALIBRATION_TEXTS
    measured = "\n".join(text for workload in workloads for text in workload.texts)
    long_texts = [text for text in corpus.calibration if len(text) > 40]
    assert len(long_texts) > CALIBRATION_TEXTS / 2
    assert not [text for text in long_texts if text in measured]


def test_cut_truncates_at_a_token_boundary(corpus: Corpus) -> None:
    assert corpus.cut("one two three", 4) == "one two"
    assert corpus.cut("one two three", 5) == "one two three"
    assert corpus.cut("one", 2) == ""
