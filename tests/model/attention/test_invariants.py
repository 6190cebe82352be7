"""Invariants of every mechanism: the result for a text does not depend on other texts or on padding.

Shape legend: B batch, T tokens, D hidden size, H heads.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from attention_reference import padded
from attnlens.patterns import Band, BlockTable
from attnlens_model import AttentionOutput, Encoder, EncoderOutput, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from configs import small_config

# For each mechanism, the variant that depends most on the batch. 40 tokens exceed all windows.
CASES: dict[str, Any] = {
    "softmax": {"kind": "softmax", "num_heads": 4, "window": 5},
    "disentangled": {"kind": "disentangled", "num_heads": 4, "terms": "c2p|p2c", "distance_buckets": 8},
    "big_bird": {"kind": "big_bird", "num_heads": 3, "block_size": 4, "num_random_blocks": 1},
    "longformer": {"kind": "longformer", "num_heads": 4, "window": 5, "num_global_tokens": 2},
    "overlapping": {"kind": "overlapping", "num_heads": 4, "overlap": 2},
    "mixture": {"kind": "mixture", "num_heads": 6, "shared_heads": 2, "active_heads": 2},
    "composed": {"kind": "composed", "num_heads": 3},
}
LONG = 40
# Around the windows and the 28 tokens up to which BigBird uses full attention.
LENGTHS = [1, 5, 28, 29, 33, LONG]


def test_every_mechanism_has_a_case() -> None:
    assert list(CASES) == list(ATTENTION_KINDS)
    assert all(case["kind"] == kind for kind, case in CASES.items())


@pytest.fixture(params=CASES)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    """Return an encoder with perturbed parameters: newly initialized kernels have almost no effect."""
    sizes = {"hidden_size": 24, "positions.max_position_embeddings": LONG + 8}
    encoder = new_encoder(small_config(sizes | {"attention": CASES[request.param]}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return encoder


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def run(encoder: Encoder, ids: Tensor, mask: Tensor | None = None) -> EncoderOutput:
    with torch.inference_mode():
        output: EncoderOutput = encoder(
            ids, torch.ones_like(ids) if mask is None else mask, output_attentions=True
        )
    return output


def named(encoder: Encoder, output: EncoderOutput) -> list[tuple[AttentionOutput, Tensor]]:
    """Return the outputs of all layers with their descriptions."""
    return [
        (described, layer[described.role])
        for number, layer in enumerate(output.layers)
        for described in encoder.config.layer_outputs(number)
    ]


def of_text(encoder: Encoder, output: EncoderOutput, text: int, length: int) -> list[Tensor]:
    """Return the hidden states (T, D) and layer outputs for a right-padded text of `length` tokens."""
    tensors = [output.last_hidden_state[text, :length]]
    for described, tensor in named(encoder, output):
        if described.layout == "per_token":
            tensors.append(tensor[text, :length])
        else:
            num_columns = length if described.layout == "dense" else None
            tensors.append(tensor[text, :, :length, :num_columns])
    return tensors


def dense(described: AttentionOutput, rows: Tensor, mask: Tensor) -> npt.NDArray[np.floating]:
    """Return the weights (H, T, T) of a text, cut after its last token if they have a sparse layout."""
    end = int(mask.nonzero()[-1]) + 1
    cut = rows[:, :end].numpy()
    if isinstance(described.pattern, Band):
        weights = described.pattern.dense(cut, mask[:end].numpy())
    elif isinstance(described.pattern, BlockTable):
        weights = described.pattern.at(end).dense(cut)
    else:
        return rows.numpy()
    assert not rows[:, end:].any()
    return weights


def test_results_do_not_depend_on_previous_texts(encoder: Encoder) -> None:
    first = run(encoder, draw(2, LONG))
    for length in LENGTHS:
        run(encoder, draw(1, length))
        # A batch of the same shape with different padding.
        run(encoder, draw(2, LONG), (torch.arange(LONG) < length).long().expand(2, -1))
        again = run(encoder, draw(2, LONG))
        for text in (0, 1):
            pairs = zip(of_text(encoder, first, text, LONG), of_text(encoder, again, text, LONG), strict=True)
            assert all(torch.equal(before, after) for before, after in pairs)


def test_result_is_independent_of_batch_and_right_padding(encoder: Encoder) -> None:
    encoder = encoder.double()
    ids = draw(len(LENGTHS), LONG)
    mask = (torch.arange(LONG)[None] < torch.tensor(LENGTHS)[:, None]).long()
    # The ids of padding are random and have no effect.
    together = run(encoder, ids, mask)
    more = torch.zeros(len(LENGTHS), 8, dtype=torch.int64)
    wider = run(encoder, torch.cat([ids, more], dim=1), torch.cat([mask, more], dim=1))
    for text, length in enumerate(LENGTHS):
        alone = of_text(encoder, run(encoder, ids[text : text + 1, :length]), 0, length)
        for output in (together, wider):
            for expected, actual in zip(alone, of_text(encoder, output, text, length), strict=True):
                limit = 1e-12 * max(1.0, float(expected.abs().max()))
                assert (actual - expected).abs().max() < limit


def test_padding_has_zero_weight_and_an_empty_text_has_only_zeros(encoder: Encoder) -> None:
    for length in LENGTHS:
        for padding, keep in padded(5, length).items():
            mask = torch.from_numpy(keep.astype(np.int64))
            output = run(encoder, draw(5, length), mask)
            for described, tensor in named(encoder, output):
                if described.layout == "per_token":
                    continue
                for rows, live in zip(tensor, mask, strict=True):
                    if not live.any():
                        assert not rows.any(), padding
                        continue
                    weights = dense(described, rows, live)
                    is_live = live[: weights.shape[-1]].numpy() == 1
                    assert not weights[..., ~is_live].any(), padding
                    if described.row_sum == "one":
                        assert np.abs(weights.sum(axis=-1)[:, is_live] - 1).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_results_are_finite_for_any_padding(encoder: Encoder, dtype: torch.dtype) -> None:
    encoder = encoder.to(dtype)
    for length in LENGTHS:
        for keep in padded(5, length).values():
            mask = torch.from_numpy(keep.astype(np.int64))
            output = run(encoder, draw(5, length), mask)
            assert output.last_hidden_state.dtype == dtype
            assert output.last_hidden_state.isfinite().all()
            for described, tensor in named(encoder, output):
                assert tensor.isfinite().all()
                empty = mask.sum(dim=1) == 0
                assert described.layout == "per_token" or not tensor[empty].any()
