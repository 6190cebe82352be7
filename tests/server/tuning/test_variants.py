"""Selection of the engines and precisions to compare and to recommend, with made-up measurements."""

import numpy as np
import pytest

from attnlens_server.tuning.variants import (
    REFERENCE,
    Accuracy,
    Turn,
    Variant,
    VariantResult,
    measure_accuracy,
    recommend,
    variants_to_compare,
)
from attnlens_server.tuning.workload import Workload

INT8 = Variant("onnxruntime", "int8")
OV_FP32, OV_BF16, OV_INT8 = (Variant("openvino", precision) for precision in ("fp32", "bf16", "int8"))
SAME, CLOSE, ROUGH = Accuracy(1.0, 1.0), Accuracy(0.99998, 0.9999), Accuracy(0.9993, 0.998)


def _result(variant: Variant, accuracy: Accuracy, *tokens_per_s: float) -> VariantResult:
    turns = tuple(Turn("CPU", rate, 1.0) for rate in tokens_per_s)
    return VariantResult(variant, turns, accuracy, None, is_checked=True)


def _recommended(*rows: VariantResult, chosen: Variant = REFERENCE) -> list[tuple[str, Variant]]:
    recommendations = recommend([_result(REFERENCE, SAME, 100.0), *rows], chosen)
    return [(each.tier.name if each.tier else "chosen", each.result.variant) for each in recommendations]


def test_fastest_variant_of_each_accuracy_is_recommended() -> None:
    assert _recommended(
        _result(INT8, ROUGH, 220.0),
        _result(OV_FP32, SAME, 105.0),
        _result(OV_BF16, CLOSE, 175.0),
        _result(OV_INT8, ROUGH, 240.0),
    ) == [("exact", REFERENCE), ("near-lossless", OV_BF16), ("approximate", OV_INT8)]


def test_less_accurate_variant_must_be_faster() -> None:
    slow = (_result(OV_BF16, CLOSE, 102.0), _result(INT8, ROUGH, 90.0))
    assert _recommended(*slow) == [("exact", REFERENCE)]
    # The more accurate variant covers the lower tier, too.
    fast = (_result(OV_BF16, CLOSE, 240.0), _result(INT8, ROUGH, 220.0))
    assert _recommended(*fast) == [("exact", REFERENCE), ("near-lossless", OV_BF16)]


def test_measured_accuracy_determines_the_tier() -> None:
    too_rough = _result(INT8, Accuracy(0.9991, 0.994), 300.0)
    assert _recommended(too_rough, _result(OV_BF16, Accuracy(0.9999, 0.9997), 150.0)) == [
        ("exact", REFERENCE),
        ("approximate", OV_BF16),
    ]


def test_chosen_variant_is_last_unless_it_is_recommended() -> None:
    rows = (_result(OV_FP32, SAME, 105.0), _result(OV_BF16, CLOSE, 175.0))
    assert _recommended(*rows, chosen=OV_FP32)[-1] == ("chosen", OV_FP32)
    assert _recommended(*rows, chosen=OV_BF16) == [("exact", REFERENCE), ("near-lossless", OV_BF16)]


def test_speeds_are_compared_within_each_round() -> None:
    reference = _result(REFERENCE, SAME, 100.0, 50.0, 100.0)  # the machine was slow in the second round
    assert _result(INT8, ROUGH, 220.0, 110.0, 190.0).speed_relative_to(reference) == pytest.approx(2.2)


def test_accuracy_is_the_cosine_similarity_of_each_text() -> None:
    reference = np.array([[1, 0], [0, 2], [3, 4]], dtype=np.float32)
    assert measure_accuracy(reference, reference) == SAME
    accuracy = measure_accuracy(np.array([[2, 0], [3, 4], [3, 4]], dtype=np.float32), reference)
    assert accuracy.mean_cosine == pytest.approx((1 + 0.8 + 1) / 3)
    assert accuracy.smallest_cosine == pytest.approx(0.8)


def test_all_variants_are_compared_once_with_the_reference_first() -> None:
    on_cpu = variants_to_compare(OV_BF16, with_fp16=False)
    assert on_cpu == [REFERENCE, INT8, OV_FP32, OV_BF16, OV_INT8]
    fp16 = Variant("onnxruntime", "fp16")
    assert variants_to_compare(fp16, with_fp16=False) == [*on_cpu, fp16]
    assert variants_to_compare(REFERENCE, with_fp16=True) == [REFERENCE, fp16, *on_cpu[1:]]


def test_sample_is_spaced_evenly_over_the_texts() -> None:
    texts = Workload("10 texts", tuple(np.full(length, length) for length in range(1, 11)))
    assert texts.sample(1000) is texts
    sample = texts.sample(22)  # the mean length is 5.5
    assert [len(text) for text in sample.input_ids] == [1, 4, 7, 10]
    assert sample.description == "4 of 10 texts"
    assert len(texts.nearest(16)) == 10
    assert len(texts.nearest(4)) == 4
