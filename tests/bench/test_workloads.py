"""The texts of the benchmark: cut before anybody gets them, and none of them known to those who quantize."""

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


def test_every_text_has_the_tokens_that_are_counted_without_being_cut(
    workloads: list[Workload], minilm_dir: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limits = {"short": (1, SHORT_TOKENS), "long": LONG_TOKENS}
    for workload in workloads:
        assert len(workload.texts) == QUICK[workload.name]
        assert workload.lengths == [len(encoding) for encoding in tokenizer.encode_batch(workload.texts)]
        least, most = limits.get(workload.name, (1, CUT_TOKENS))
        assert least - 5 <= min(workload.lengths)  # a cut inside a word may leave a few tokens less
        assert max(workload.lengths) <= most


def test_no_calibration_text_is_part_of_what_is_measured(corpus: Corpus, workloads: list[Workload]) -> None:
    assert len(set(corpus.calibration)) == CALIBRATION_TEXTS
    measured = "\n".join(text for workload in workloads for text in workload.texts)
    long_ones = [text for text in corpus.calibration if len(text) > 40]
    assert len(long_ones) > CALIBRATION_TEXTS / 2
    assert not [text for text in long_ones if text in measured]


def test_a_text_is_cut_at_a_token(corpus: Corpus) -> None:
    assert corpus.cut("one two three", 4) == "one two"
    assert corpus.cut("one two three", 5) == "one two three"
    assert corpus.cut("one", 2) == ""
