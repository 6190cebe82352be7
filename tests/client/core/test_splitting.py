"""Property tests of splitting texts into calls."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnlens.reductions import AttentionReduction, TopK
from attnlens.v1.encoder_service_pb2 import Input
from attnlens.v1.manifest_pb2 import Architecture
from attnlens.v1.model_pb2 import Limits, Model
from attnlens_client import AttentionQuery, TokenIds
from attnlens_client.core import plans
from attnlens_client.core.models import model_info
from attnlens_client.core.plans import explain
from attnlens_client.core.splitting import (
    Cost,
    embed_response_bytes,
    encode_computed_tokens,
    encode_response_bytes,
    max_concurrent_calls,
    split,
)
from attnlens_client.errors import InvalidRequestError
from attnlens_client.model_info import ModelInfo

LIMITS = st.integers(min_value=0, max_value=50)


def _model(**limits: Any) -> ModelInfo:
    sizes = Architecture(hidden_size=384, intermediate_size=1536, num_layers=6, num_heads=12)
    return model_info(Model(architecture=sizes, embedding_size=384, max_tokens=256, limits=Limits(**limits)))


TEXT = st.builds(Cost, *[st.integers(low, 100) for low in (1, 1, 0, 0)])
MAX_BYTES = st.integers(0, 300)


@given(
    st.lists(TEXT),
    st.integers(1, 20),
    LIMITS,
    LIMITS,
    MAX_BYTES,
    MAX_BYTES,
    MAX_BYTES,
    MAX_BYTES,
    st.integers(0, 99),
)
@example([Cost(1, 1, 1, 1)] * 3, 2, 0, 0, 0, 0, 0, 0, 0)  # limited by the batch size only
def test_batches_cover_the_texts_in_order_within_the_limits(
    texts: list[Cost],
    batch_size: int,
    max_inputs: int,
    max_concurrent_inputs: int,
    max_request: int,
    max_response: int,
    max_text: int,
    max_cost: int,
    fixed: int,
) -> None:
    limits = _model(
        max_inputs_per_request=max_inputs,
        max_concurrent_inputs=max_concurrent_inputs,
        max_response_bytes=max_response,
        max_request_text_bytes=max_text,
        max_request_bytes=max_request,
        max_computed_tokens=max_cost,
    ).limits
    runs = [texts[run] for run in split(texts, limits, batch_size, fixed)]
    assert [text for run in runs for text in run] == texts
    for run in runs:
        assert 1 <= len(run) <= batch_size
        assert len(run) <= (max_inputs or batch_size)
        assert len(run) <= max(1, max_concurrent_inputs // 4) or not max_concurrent_inputs
        request, response, text, computed = map(sum, zip(*run, strict=True))
        assert len(run) == 1 or max_request == 0 or request + fixed <= max_request
        assert len(run) == 1 or max_response == 0 or response <= max_response
        assert len(run) == 1 or max_text == 0 or text <= max_text
        assert len(run) == 1 or max_cost == 0 or computed <= max_cost


def test_explain_batches_are_bounded_by_text_length_not_by_the_model_limit() -> None:
    """120 short texts for a model with an 8,192-token limit take a few calls, not one call per text."""
    sizes = Architecture(hidden_size=384, num_layers=6, num_heads=12)
    limits = Limits(max_computed_tokens=1 << 18, max_response_bytes=1 << 22)
    model = model_info(Model(architecture=sizes, embedding_size=384, max_tokens=8192, limits=limits))
    texts = ["nine short words, and a full stop."] * 120
    count = {
        method: len(list(explain(texts, methods=method).requests(model, 120)))
        for method in ("contributions", "leave_one_out", "contribution_norm")
    }
    assert count == {"contributions": 1, "leave_one_out": 1, "contribution_norm": 14}


@pytest.mark.parametrize(
    ("limits", "runs"), [({"max_request_bytes": 5_000}, 5), ({"max_request_bytes": 1 << 20}, 1)]
)
def test_token_ids_are_split_by_request_size(limits: dict[str, int], runs: int) -> None:
    model = _model(max_response_bytes=1 << 20, **limits)
    texts = [[1000] * 1000] * 10  # two bytes each
    requests = [request for _, request in plans.embed(texts).requests(model, 100)]
    assert len(requests) == runs
    assert all(request.ByteSize() <= model.limits.max_request_bytes for request in requests)


def test_prompt_reduces_the_space_for_texts() -> None:
    model = _model(max_request_bytes=1000)
    plan = plans.embed(["x" * 80] * 8, prompt="p" * 500)
    requests = [request for _, request in plan.requests(model, 100)]
    assert sum(len(each.inputs) for each in requests) == 8
    assert all(request.ByteSize() <= 1000 for request in requests)


def test_cost_is_an_upper_bound_of_the_request_size() -> None:
    texts = [Input(text="a"), Input(text="word " * 1000)]
    model = _model()
    assert embed_response_bytes(plans.embed([]).template, model) >= 384 * 4

    def size(text: int, *queries: AttentionQuery, **options: Any) -> int:
        template = plans.encode([], attention=queries, **options).template
        return encode_response_bytes(template, queries, texts, model)[text]

    assert size(0, AttentionQuery()) >= 3 * 384 * 4 + 72 * 3 * 3 * 4
    assert size(1, AttentionQuery()) >= 256 * 384 * 4 + 72 * 256 * 256 * 4
    one_map = 256 * 256 * 4
    two_heads, mean = AttentionQuery(layers=[0], heads=[1, 2]), AttentionQuery(layers=[0], view="head_mean")
    assert 2 * one_map <= size(1, two_heads, last_hidden_state=False) < 3 * one_map
    assert one_map / 2 <= size(1, mean, last_hidden_state=False, dtype="float16") < one_map
    assert 3 * one_map <= size(1, mean, two_heads, last_hidden_state=False) < 4 * one_map
    assert size(0, prompt="p" * 1000) >= 256 * 384 * 4


@pytest.mark.parametrize(
    ("options", "size", "runs"),
    [
        ({}, 9, [2, 2, 2]),
        ({"prompt_name": "query"}, 7, [2, 2, 2]),
        ({"prompt": "ü"}, 2, [4, 2]),
        ({"prompt": ""}, 0, [6]),
        ({"prompt_name": "no"}, 0, [6]),
    ],
)
def test_prompt_bytes_count_for_each_text(options: dict[str, Any], size: int, runs: list[int]) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    limits = Limits(max_request_text_bytes=30, max_text_bytes=15)
    message = Model(embedding_size=4, prompts=prompts, default_prompt_name="passage", limits=limits)
    model = model_info(message)
    requests = [request for _, request in plans.embed(["abcde"] * 6, **options).requests(model, 100)]
    assert [len(each.inputs) for each in requests] == runs
    with pytest.raises(
        InvalidRequestError, match=rf"has 16 bytes{' with the prompt' * bool(size)}, but the limit is 15"
    ):
        list(plans.embed(["x" * (16 - size)], **options).requests(model, 100))


@pytest.mark.parametrize(("limit", "runs"), [(0, [6]), (10_000, [6]), (1_000, [2, 2, 2]), (1, [1] * 6)])
def test_texts_are_split_by_the_cost_of_explaining_them(limit: int, runs: list[int]) -> None:
    model = _model(max_computed_tokens=limit)
    for methods, expected in (("leave_one_out", runs), ("contributions", [6])):
        plan = explain(["x" * 18] * 6, methods=methods)  # type: ignore[arg-type]
        assert [len(each.inputs) for _, each in plan.requests(model, 100)] == expected


def test_texts_are_split_by_the_cost_of_their_reductions() -> None:
    model = _model(max_computed_tokens=3_000)
    texts = ["word " * 100] * 64
    for reduction, is_split in ((AttentionReduction(level="words", form=TopK(5)), True), (None, False)):
        plan = plans.encode(texts, attention=AttentionQuery(reduction=reduction), last_hidden_state=False)
        requests = [request for _, request in plan.requests(model, 100)]
        assert (len(requests) > 1) == is_split
        costs = encode_computed_tokens(plan.template, plan.queries, texts_of(texts), model)
        assert all(sum(costs[: len(each.inputs)]) <= 3_000 for each in requests)


def texts_of(texts: list[str]) -> list[Input]:
    return [Input(text=text) for text in texts]


def test_both_texts_of_a_pair_count_and_token_ids_have_no_text_bytes() -> None:
    model = _model(max_text_bytes=10, max_request_text_bytes=20)
    [(_, request)] = plans.embed([("abcde", "fghij"), ("é", "é"), [1] * 99]).requests(model, 100)
    assert len(request.inputs) == 3
    with pytest.raises(InvalidRequestError, match=r"texts\[1\] has 11 bytes, but the limit is 10"):
        list(plans.tokenize(["a", ("abcde", "fghijk")]).requests(model, 100))
    with pytest.raises(
        InvalidRequestError, match=r"but the limit is 10: truncate needs the whole text.* --max-text-bytes"
    ):
        list(plans.embed(["a" * 11], truncate=True).requests(model, 100))
    assert len(list(plans.embed([TokenIds([1] * 99)], prompt="p" * 10).requests(model, 100))) == 1


def test_one_caller_does_not_overflow_the_queue() -> None:
    assert max_concurrent_calls(8, 128, None) == 8
    assert max_concurrent_calls(8, 128, _model(max_concurrent_inputs=2048)) == 8
    assert max_concurrent_calls(8, 128, _model(max_concurrent_inputs=512)) == 4
    assert max_concurrent_calls(8, 128, _model(max_concurrent_inputs=1)) == 1
