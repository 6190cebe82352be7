"""The float64 reference: the numbers of a float64 copy (tests/export/test_families.py), without the copy."""

import copy
import threading
import weakref

import numpy as np
import pytest
import torch

from attnlens_export.contributions.measure import ablated_heads
from attnlens_export.parity import reference
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import FloatArray, run_float64, run_fp32
from attnlens_model import Encoder, EncoderConfig, new_encoder
from configs import changed

CASE = Case(2, 7, Padding.RIGHT)


def test_no_more_than_one_matrix_is_cast_at_a_time(
    tiny_encoder: Encoder, tiny_config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an embedding table, only the rows that were used: tables can be most of an encoder."""
    cast: list[weakref.ref[torch.Tensor]] = []
    exact = reference._to_float64

    def note(value: object) -> object:
        found = exact(value)
        if found is not value:
            assert sum(each() is not None for each in cast) <= 4  # a weight, a bias, activations
            cast.append(weakref.ref(found))
        return found

    monkeypatch.setattr(reference, "_to_float64", note)
    token_table = tiny_encoder.embeddings.token.weight
    # The largest of the others is 48 x 56.
    assert token_table.numel() == 101 * 48
    sizes: list[int] = []
    double = torch.Tensor.double

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return double(tensor)

    monkeypatch.setattr(torch.Tensor, "double", noted)
    run_float64(tiny_encoder, make_inputs(CASE, tiny_config), lambda _name, _weights: None)
    assert len(sizes) > 2 * 16
    assert max(sizes) == 48 * 56


def test_one_map_exists_at_a_time(tiny_encoder: Encoder, tiny_config: EncoderConfig) -> None:
    seen: list[weakref.ref[FloatArray]] = []

    def each_output(name: str, weights: FloatArray) -> None:
        assert name == f"attentions.{len(seen)}"
        assert weights.dtype == float and weights.shape == (2, 4, 7, 7)  # noqa: PT018
        assert all(each() is None for each in seen)
        seen.append(weakref.ref(weights))

    run_float64(tiny_encoder, make_inputs(CASE, tiny_config), each_output)
    assert len(seen) == tiny_config.num_layers


def test_computed_tables_match_a_float64_copy(tiny_config: EncoderConfig) -> None:
    """A table of angles that is rounded to fp32 and then cast would be rounded still."""
    rotary = changed(
        tiny_config, {"family": "nomic_bert", "attention.rotary.theta": 1000.0, "positions.scheme": "none"}
    )
    encoder = new_encoder(rotary, seed=0)
    inputs = make_inputs(CASE, rotary)
    before = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    hidden = run_float64(encoder, inputs, lambda _name, _weights: None)
    with torch.no_grad():
        feed = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
        expected = copy.deepcopy(encoder).double()(**feed).last_hidden_state
    assert np.array_equal(hidden, expected.numpy())
    assert before
    for name, buffer in encoder.named_buffers():
        assert buffer.equal(before[name])
        assert not buffer.is_inference()


def test_encoder_is_as_before(tiny_encoder: Encoder, tiny_config: EncoderConfig) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_encoder.state_dict().items()}

    def fail(_name: str, _weights: FloatArray) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run_float64(tiny_encoder, make_inputs(CASE, tiny_config), fail)
    seen: list[str] = []
    run_float64(tiny_encoder, make_inputs(CASE, tiny_config), lambda name, _weights: seen.append(name))
    assert seen == ["attentions.0", "attentions.1"]  # the hooks of the failed run are gone
    after = tiny_encoder.state_dict()
    assert all(after[name].dtype == torch.float32 and after[name].equal(before[name]) for name in before)


def test_runs_in_two_threads_do_not_share_hooks(tiny_encoder: Encoder, tiny_config: EncoderConfig) -> None:
    """A measurement in another thread removes heads meanwhile."""
    inputs = make_inputs(CASE, tiny_config)
    shape = (tiny_config.num_layers, tiny_config.layer_attentions[0].num_heads)
    are_removed, may_return = threading.Event(), threading.Event()

    def remove_heads() -> None:
        with ablated_heads(tiny_encoder, np.zeros(shape, np.float32)):
            are_removed.set()
            may_return.wait(30)

    def run_in_fp32() -> FloatArray:
        return run_fp32(tiny_encoder, inputs, with_attentions=False)["last_hidden_state"]

    def run_in_float64() -> FloatArray:
        return run_float64(tiny_encoder, inputs, lambda _name, _weights: None)

    for run in (run_in_fp32, run_in_float64):
        expected = run()
        are_removed.clear()
        may_return.clear()
        thread = threading.Thread(target=remove_heads)
        thread.start()
        assert are_removed.wait(30)
        threading.Timer(0.2, may_return.set).start()
        found = run()
        assert may_return.is_set()
        np.testing.assert_array_equal(found, expected)
        thread.join()
