"""Which engines and precisions are compared, and which of them are offered, on made-up measurements."""

import numpy as np
import pytest

from attnlens_server.tuning.variants import (
    REFERENCE,
    Accuracy,
    Measured,
    Turn,
    Variant,
    agreement,
    offers,
    variants_to_compare,
)
from attnlens_server.tuning.workload import Workload

INT8 = Variant("onnxruntime", "int8")
OV_FP32, OV_BF16, OV_INT8 = (Variant("openvino", precision) for precision in ("fp32", "bf16", "int8"))
SAME, CLOSE, ROUGH = Accuracy(1.0, 1.0), Accuracy(0.99998, 0.9999), Accuracy(0.9993, 0.998)


def _measured(variant: Variant, accuracy: Accuracy, *tokens_per_s: float) -> Measured:
    turns = tuple(Turn("CPU", rate, 1.0) for rate in tokens_per_s)
    return Measured(variant, turns, accuracy, None, is_checked=True)


def _offered(*rows: Measured, asked: Variant = REFERENCE) -> list[tuple[str, Variant]]:
    found = offers([_measured(REFERENCE, SAME, 100.0), *rows], asked)
    return [(offer.tier.name if offer.tier else "asked", offer.measured.variant) for offer in found]


def test_the_fastest_of_each_accuracy_is_offered() -> None:
    assert _offered(
        _measured(INT8, ROUGH, 220.0),
        _measured(OV_FP32, SAME, 105.0),
        _measured(OV_BF16, CLOSE, 175.0),
        _measured(OV_INT8, ROUGH, 240.0),
    ) == [("exact", REFERENCE), ("near-lossless", OV_BF16), ("approximate", OV_INT8)]


def test_what_is_less_exact_must_be_faster() -> None:
    slow = (_measured(OV_BF16, CLOSE, 102.0), _measured(INT8, ROUGH, 90.0))
    assert _offered(*slow) == [("exact", REFERENCE)]
    # What is more exact is offered for the lower accuracy too, so nothing slower is.
    fast = (_measured(OV_BF16, CLOSE, 240.0), _measured(INT8, ROUGH, 220.0))
    assert _offered(*fast) == [("exact", REFERENCE), ("near-lossless", OV_BF16)]


def test_the_accuracy_that_was_found_decides_and_not_the_name() -> None:
    too_rough = _measured(INT8, Accuracy(0.9991, 0.994), 300.0)
    assert _offered(too_rough, _measured(OV_BF16, Accuracy(0.9999, 0.9997), 150.0)) == [
        ("exact", REFERENCE),
        ("approximate", OV_BF16),
    ]


def test_what_was_asked_for_comes_last_if_it_is_nothing_else() -> None:
    rows = (_measured(OV_FP32, SAME, 105.0), _measured(OV_BF16, CLOSE, 175.0))
    assert _offered(*rows, asked=OV_FP32)[-1] == ("asked", OV_FP32)
    assert _offered(*rows, asked=OV_BF16) == [("exact", REFERENCE), ("near-lossless", OV_BF16)]


def test_speeds_are_compared_within_each_round() -> None:
    reference = _measured(REFERENCE, SAME, 100.0, 50.0, 100.0)  # the machine was slow in the second round
    assert _measured(INT8, ROUGH, 220.0, 110.0, 190.0).speed_relative_to(reference) == pytest.approx(2.2)


def test_agreement_is_the_cosine_of_the_two_vectors_of_each_text() -> None:
    reference = np.array([[1, 0], [0, 2], [3, 4]], dtype=np.float32)
    assert agreement(reference, reference) == SAME
    found = agreement(np.array([[2, 0], [3, 4], [3, 4]], dtype=np.float32), reference)
    assert found.mean_cosine == pytest.approx((1 + 0.8 + 1) / 3)
    assert found.smallest_cosine == pytest.approx(0.8)


def test_everything_is_compared_once_and_the_reference_comes_first() -> None:
    on_cpu = variants_to_compare(OV_BF16, with_fp16=False)
    assert on_cpu == [REFERENCE, INT8, OV_FP32, OV_BF16, OV_INT8]
    fp16 = Variant("onnxruntime", "fp16")
    assert variants_to_compare(fp16, with_fp16=False) == [*on_cpu, fp16]
    assert variants_to_compare(REFERENCE, with_fp16=True) == [REFERENCE, fp16, *on_cpu[1:]]


def test_a_sample_is_spaced_evenly_over_the_texts() -> None:
    texts = Workload("10 texts", tuple(np.full(length, length) for length in range(1, 11)))
    assert texts.sample(1000) is texts
    sample = texts.sample(22)  # the mean length is 5.5
    assert [len(text) for text in sample.input_ids] == [1, 4, 7, 10]
    assert sample.description == "4 of 10 texts"
    assert len(texts.nearest(16)) == 10
    assert len(texts.nearest(4)) == 4
