"""Which ranges quantized embeddings use, and which combinations of fields are rejected."""

from typing import Any

import numpy as np
import pytest

from attnlens.embedding_types import EmbeddingType
from attnlens.pooling import Pooling
from attnlens_server.errors import InvalidFieldsError, InvalidResultError
from attnlens_server.operations.embed import EmbedOperation, EmbedRequest
from attnlens_server.operations.values import check_finite
from attnlens_server.text import Input
from model_services import plans_of
from toy_models import make_model

MEASURED = np.array([[-1, -1, -1], [1, 1, 1]], np.float32)
GIVEN = 2 * MEASURED
INT8 = EmbeddingType.INT8


def make_validator(**changes: Any) -> EmbedOperation:
    facts = {"normalize": True, "embedding_size": 3, "max_dimensions": 3, "embedding_ranges": MEASURED}
    return plans_of(make_model(**facts | changes)).embed


def request(**fields: Any) -> EmbedRequest:
    return EmbedRequest(inputs=[Input(text="a")], **{"embedding_type": INT8} | fields)


def problem(validator: EmbedOperation, **fields: Any) -> str:
    with pytest.raises(InvalidFieldsError) as caught:
        validator.plan(request(**fields))
    [violation] = caught.value.violations
    assert violation.field == "ranges"
    return violation.description


@pytest.mark.parametrize("fields", [{}, {"dimensions": 3}, {"normalize": True}, {"pooling": Pooling.MEAN}])
def test_measured_ranges_are_used_if_they_fit(fields: dict[str, Any]) -> None:
    plan = make_validator().plan(request(**fields))
    assert plan.ranges is MEASURED


@pytest.mark.parametrize("fields", [{"dimensions": 2}, {"normalize": False}, {"pooling": Pooling.CLS}])
def test_measured_ranges_are_rejected_for_embeddings_with_another_scale(fields: dict[str, Any]) -> None:
    size = fields.get("dimensions", 3)
    assert problem(make_validator(), **fields) == (
        "is not set, but EMBEDDING_TYPE_INT8 needs ranges, and those in the bundle only fit the model's own "
        f"pooling, normalize and dimensions: send ranges of shape [2, {size}], or omit these fields"
    )
    ranges = GIVEN[:, :size]
    assert make_validator().plan(request(ranges=ranges, **fields)).ranges is ranges


@pytest.mark.parametrize("fields", [{"dimensions": 3}, {"normalize": True}])
def test_published_truncation_scales_first(fields: dict[str, Any]) -> None:
    """The default embedding is shorter than 1. With these fields, it has length 1."""
    validator = make_validator(max_dimensions=4)
    assert validator.plan(request()).ranges is MEASURED
    assert problem(validator, **fields).endswith("or omit these fields")
    unscaled = make_validator(max_dimensions=4, normalize=False)
    assert unscaled.plan(request(dimensions=3)).ranges is MEASURED


def test_bundle_without_ranges_needs_them_in_the_request() -> None:
    validator = make_validator(embedding_ranges=None)
    assert problem(validator) == (
        "is not set, but EMBEDDING_TYPE_INT8 needs ranges, and the bundle does not contain any: send ranges "
        "of shape [2, 3], or export the model again"
    )
    assert validator.plan(request(ranges=GIVEN)).ranges is GIVEN
    assert validator.plan(request(embedding_type=EmbeddingType.BINARY)).ranges is None


@pytest.mark.parametrize("embedding_type", [EmbeddingType.FLOAT, EmbeddingType.BINARY, EmbeddingType.UBINARY])
def test_ranges_are_rejected_if_nothing_uses_them(embedding_type: EmbeddingType) -> None:
    assert problem(make_validator(), embedding_type=embedding_type, ranges=GIVEN) == (
        f"is set, but embedding_type is EMBEDDING_TYPE_{embedding_type.name}, which does not use ranges: "
        "omit it"
    )


def test_defective_ranges_are_rejected_with_the_expected_shape() -> None:
    assert problem(make_validator(), ranges=GIVEN[:, :2]) == (
        "has the shape [2, 2], expected [2, 3]: send the minimum and maximum of each component"
    )


def test_request_ranges_take_precedence() -> None:
    assert make_validator().plan(request(ranges=GIVEN)).ranges is GIVEN


@pytest.mark.parametrize(("embedding_type", "size"), [(1, 40), (2, 10), (3, 10), (4, 2), (5, 2)])
def test_row_size_is_that_of_the_type(embedding_type: int, size: int) -> None:
    validator = make_validator(embedding_size=10, max_dimensions=10, embedding_ranges=np.zeros((2, 10)))
    assert validator.plan(request(embedding_type=EmbeddingType(embedding_type))).row_bytes == size


def test_embedding_that_is_not_finite_is_an_error() -> None:
    check_finite(np.ones((2, 3), np.float32))
    with pytest.raises(InvalidResultError, match=r"inputs\[1\] has NaN or infinity in its result"):
        check_finite(np.array([[1, 2], [np.inf, 0]], np.float32))
