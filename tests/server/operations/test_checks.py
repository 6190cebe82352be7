"""Cost of request validation, which runs on the event loop and delays every other call."""

import time

import pytest

from attnlens_server.bundle import Layout, Output, OutputRole, RowSum
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.operations.attention import MAX_QUERIES, AttentionQuery, AttentionView
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.service import ModelService
from attnlens_server.text import Input, TextPair, TokenIds
from model_services import plans_of
from toy_models import make_model


def make_checks(*outputs: Output, takes_pairs: bool = True, side: str = "right") -> ModelService:
    return plans_of(make_model(*outputs), takes_pairs=takes_pairs, side=side)


def violations(checks: ModelService, job: EncodeRequest) -> dict[str, str]:
    with pytest.raises(InvalidFieldsError) as caught:
        checks.encode.plan(job)
    return {violation.field: violation.description for violation in caught.value.violations}


def seconds_to_refuse(job: EmbedRequest) -> float:
    checks = make_checks()
    started = time.thread_time()
    with pytest.raises(InvalidFieldsError, match="with the prompt"):
        checks.embed.plan(job)
    return time.thread_time() - started


def test_large_prompt_is_measured_once_per_request() -> None:
    prompt = Prompt(text="€" * 2_000_000)
    one, many = (EmbedRequest(inputs=[Input(text="a")] * count, prompt=prompt) for count in (1, 500))
    assert seconds_to_refuse(many) < 50 * seconds_to_refuse(one)


def test_prompt_counts_towards_the_size_of_each_text() -> None:
    checks = plans_of(make_model(), max_text_bytes=100, max_request_text_bytes=250)
    prompt = Prompt(text="p" * 90)
    checks.embed.plan(EmbedRequest(inputs=[Input(text="a")] * 2, prompt=prompt))
    with pytest.raises(
        InvalidFieldsError, match="has 273 bytes of text with the prompt, but the limit is 250"
    ):
        checks.embed.plan(EmbedRequest(inputs=[Input(text="a")] * 3, prompt=prompt))


@pytest.mark.parametrize(("side", "used", "unused"), [("right", 7, 8), ("left", 2, 1), ("left", 9, 0)])
def test_only_ids_that_truncation_keeps_are_validated(side: str, used: int, unused: int) -> None:
    checks, field = make_checks(side=side), "inputs[0].token_ids.input_ids"
    for bad in (10**6, -1, 2**70):
        ids = [1] * 10
        ids[unused] = bad
        checks.encode.plan(EncodeRequest(inputs=[Input(token_ids=TokenIds(ids))]))
        ids[used] = bad
        given = EncodeRequest(inputs=[Input(token_ids=TokenIds(ids))])
        assert violations(checks, given) == {f"{field}[{used}]": f"is {bad}: use 0 to 49"}


WEIGHTS = [
    Output(f"weights.{layer}", OutputRole.ATTENTION_WEIGHTS, Layout.DENSE, layer, heads, row_sum=RowSum.ONE)
    for layer, heads in enumerate((4, 4, 2))
]
GATES = Output("gates", OutputRole.HEAD_GATES, Layout.PER_TOKEN, 1, 4)
ONE = [Input(text="a")]


def test_each_query_selects_graph_outputs() -> None:
    queries = [
        AttentionQuery(layers=[-2, 0], heads=[3, -4]),
        AttentionQuery(OutputRole.HEAD_GATES, view=AttentionView.HEAD_MEAN),
    ]
    plan = make_checks(*WEIGHTS, GATES).encode.plan(EncodeRequest(inputs=ONE, attention=queries))
    assert plan.hidden_state is None
    assert plan.kind == "attention"
    assert [output.name for _, [output] in plan.parts] == ["weights.1", "weights.0", "gates"]
    assert [query.heads for query in plan.queries] == [(3, 0), (0, 1, 2, 3)]
    assert [query.num_values(10) for query in plan.queries] == [2 * 100, 10]
    [first, _, last] = plan.outputs(plan.parts)
    assert (first.name, first.layout) == ("weights.1", Layout.DENSE)
    assert (last.name, last.layout) == ("gates", Layout.PER_TOKEN)


def test_layers_with_different_head_counts_require_separate_queries() -> None:
    checks = make_checks(*WEIGHTS)
    assert violations(checks, EncodeRequest(inputs=ONE, attention=[AttentionQuery()])) == {
        "attention[0].layers": "have different numbers of heads (2, 4): request them in separate queries"
    }
    plan = checks.encode.plan(EncodeRequest(inputs=ONE, attention=[AttentionQuery(layers=[2], heads=[-1])]))
    assert plan.queries[0].heads == (1,)


def test_missing_role_is_reported_with_the_available_ones() -> None:
    job = EncodeRequest(
        inputs=ONE, attention=[AttentionQuery(layers=[0, 1]), AttentionQuery(OutputRole.HEAD_GATES)]
    )
    assert violations(make_checks(*WEIGHTS), job) == {
        "attention[1].role": "is OUTPUT_ROLE_HEAD_GATES: the model has OUTPUT_ROLE_ATTENTION_WEIGHTS"
    }


def test_layer_without_the_output_is_reported_by_index() -> None:
    job = EncodeRequest(inputs=ONE, attention=[AttentionQuery(OutputRole.HEAD_GATES, layers=[1, 0])])
    assert violations(make_checks(*WEIGHTS, GATES), job) == {
        "attention[0].layers[1]": "is 0, a layer without this output: use 1"
    }


def test_too_many_queries_and_repeated_indices_are_reported() -> None:
    checks = make_checks(*WEIGHTS)
    many = [AttentionQuery(layers=[2])] * (MAX_QUERIES + 1)
    assert violations(checks, EncodeRequest(inputs=ONE, attention=many)) == {
        "attention": "has more than 16 queries: send several requests"
    }
    repeated = AttentionQuery(layers=[1, 0, -2], heads=[3, 4])
    assert violations(checks, EncodeRequest(inputs=ONE, attention=[many[0], repeated])) == {
        "attention[1].layers[2]": "is -2, which is listed twice: remove it",
        "attention[1].heads[1]": "is 4, but the model has 4: use 0 to 3, or -4 to -1",
    }


def test_pair_is_measured_as_a_whole_and_rejected_if_unsupported() -> None:
    pair = Input(text_pair=TextPair("a" * 70_000, "b" * 70_000))
    assert violations(make_checks(), EncodeRequest(inputs=[pair])) == {
        "inputs[0].text_pair": "has 140000 bytes, but the limit is 131072: split the text"
    }
    small = Input(text_pair=TextPair("a", "b"))
    assert violations(make_checks(takes_pairs=False), EncodeRequest(inputs=[Input(text="a"), small])) == {
        "inputs[1].text_pair": "is not supported by this model: send text"
    }


def test_token_types_must_match_the_ids_and_be_in_range() -> None:
    inputs = [
        Input(token_ids=TokenIds([1, 2], [0, 1])),
        Input(token_ids=TokenIds([1, 2], [0])),
        Input(token_ids=TokenIds([1, 2], [0, 2])),
    ]
    assert violations(make_checks(), EncodeRequest(inputs=inputs)) == {
        "inputs[1].token_ids.token_type_ids": "has 1 values for 2 ids: send one per id, or none",
        "inputs[2].token_ids.token_type_ids[1]": "is 2: use 0 to 1",
    }


def test_violation_contains_the_input_index() -> None:
    with pytest.raises(InvalidFieldsError) as caught:
        make_checks().encode.plan(EncodeRequest(inputs=[*ONE, Input()], prompt=Prompt()))
    assert [(violation.field, violation.input_index) for violation in caught.value.violations] == [
        ("prompt", None),
        ("inputs[1]", 1),
    ]
