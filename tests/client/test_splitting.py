"""How texts are shared out over calls: pure functions, tried on anything."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attnlens.v1.encoder_service_pb2 import Input, Limits, Model
from attnlens.v1.manifest_pb2 import Architecture
from attnlens_client.channel import Settings
from attnlens_client.messages import embed_request, encode_request
from attnlens_client.parsing import model_info
from attnlens_client.results import ModelInfo
from attnlens_client.splitting import embed_costs, encode_costs, max_in_flight, split

LIMITS = st.integers(min_value=0, max_value=50)


def _model(**limits: Any) -> ModelInfo:
    sizes = Architecture(hidden_size=384, num_layers=6, num_heads=12)
    return model_info(Model(architecture=sizes, max_tokens=256, limits=Limits(**limits)))


@given(st.lists(st.integers(1, 100)), st.integers(1, 20), LIMITS, LIMITS, st.integers(0, 300))
def test_runs_cover_the_texts_in_order_and_keep_the_limits(
    costs: list[int], batch_size: int, max_inputs: int, max_queue: int, max_bytes: int
) -> None:
    model = _model(max_inputs_per_request=max_inputs, max_queue=max_queue, max_message_bytes=max_bytes)
    runs = [costs[run] for run in split(costs, model, batch_size)]
    assert [cost for run in runs for cost in run] == costs
    for run in runs:
        assert 1 <= len(run) <= batch_size
        assert len(run) <= (max_inputs or batch_size)
        assert len(run) <= max(1, max_queue // 4) or not max_queue
        assert len(run) == 1 or max_bytes == 0 or sum(run) <= max_bytes


def test_costs_are_bounds_of_what_is_sent() -> None:
    texts = [Input(text="a"), Input(text="word " * 1000)]
    model = _model()
    small, large = embed_costs(embed_request(), texts, model)
    assert small >= 384 * 4
    assert large >= texts[1].ByteSize()
    everything = encode_costs(encode_request(), texts, model)
    assert everything[0] >= 3 * 384 * 4 + 72 * 3 * 3 * 4
    assert everything[1] >= 256 * 384 * 4 + 72 * 256 * 256 * 4
    one_map = encode_request(layers=[0], heads=[1, 2], hidden_states=False)
    assert 2 * 256 * 256 * 4 <= encode_costs(one_map, texts, model)[1] < 3 * 256 * 256 * 4
    mean = encode_request(layers=[0], head_reduction="mean", hidden_states=False, dtype="float16")
    assert 256 * 256 * 2 <= encode_costs(mean, texts, model)[1] < 2 * 256 * 256 * 2


def test_one_caller_does_not_overfill_the_queue() -> None:
    settings = Settings(batch_size=128, max_in_flight=8)
    assert max_in_flight(settings, None) == 8
    assert max_in_flight(settings, _model(max_queue=2048)) == 8
    assert max_in_flight(settings, _model(max_queue=512)) == 4
    assert max_in_flight(settings, _model(max_queue=1)) == 1
