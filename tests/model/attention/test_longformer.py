"""Longformer attention against a float64 NumPy reference for one text, written from the paper.

Padding takes up positions, so it counts in distances, but no token attends to it.
"""

import math
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from attnlens.patterns import Band
from attnlens_model import (
    ATTENTION_WEIGHTS,
    ConfigError,
    Encoder,
    EncoderConfig,
    LongformerAttentionConfig,
    new_encoder,
)
from attnlens_model.attention.longformer import LongformerSelfAttention
from attnlens_model.attention.mechanism import BatchInputs, EncoderSizes
from attnlens_model.attention.parts.sliding_window import block_size
from configs import small_config

Array = npt.NDArray[np.float64]
WIDTH, HEADS = 12, 3
SIZES = EncoderSizes(WIDTH, 200, is_causal=False, hidden_dropout=0.0, layer_norm_eps=1e-5)
Form = Literal["blocks", "dense"]
FORMS: list[Form] = ["blocks", "dense"]
# Input lengths by window, for one or several blocks of queries with one or two blocks of keys on each side.
WINDOWS = {1: [1, 2, 3, 4, 7], 4: [1, 3, 4, 5, 8, 9, 13, 14], 40: [1, 31, 32, 33, 40, 41, 64, 65, 81, 122]}


def projected(layer: nn.Linear, rows: Array) -> Array:
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    return np.asarray(rows @ weight.T + bias, dtype=np.float64)


def reference(
    layer: LongformerSelfAttention, hidden: Array, mask: npt.NDArray[np.int64], window: int, num_global: int
) -> tuple[Array, Array]:
    """Return the context (T, D) and the weights (H, T, T) for one text."""
    live = [int(position) for position in np.flatnonzero(mask)]
    global_tokens = live[:num_global]
    size = WIDTH // HEADS
    heads, weights = np.zeros_like(hidden), np.zeros((HEADS, len(mask), len(mask)))
    local = layer.query, layer.key, layer.value
    for i in live:
        own = (layer.global_query, layer.global_key, layer.global_value) if i in global_tokens else local
        visible = [j for j in live if i in global_tokens or j in global_tokens or abs(i - j) <= window]
        query, keys, values = (
            projected(part, rows) for part, rows in zip(own, (hidden[i], hidden, hidden), strict=True)
        )
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = np.array([query[part] @ keys[j, part] for j in visible]) / math.sqrt(size)
            exponentials = np.exp(scores - scores.max())
            weights[head, i, visible] = exponentials / exponentials.sum()
            heads[i, part] = weights[head, i] @ values[:, part]
    return projected(layer.output, heads), weights


def masks(tokens: int) -> Tensor:
    """Return masks (6, T): no padding, right, left, middle, every third token, only padding."""
    rows = torch.ones(6, tokens, dtype=torch.int64)
    rows[1, (tokens + 1) // 2 :] = 0
    rows[2, : tokens // 2] = 0
    rows[3, tokens // 4 : 3 * tokens // 4] = 0
    rows[4, 1::3] = 0
    rows[5] = 0
    return rows


def make(
    window: int, num_global: int, form: Form, dropout: float = 0.0
) -> tuple[LongformerAttentionConfig, LongformerSelfAttention]:
    config = LongformerAttentionConfig(
        num_heads=HEADS,
        window=window,
        num_global_tokens=num_global,
        form=form,
        dropout=dropout,
    )
    torch.manual_seed(1)
    layer = config.make_layer(SIZES).double().eval()
    assert isinstance(layer, LongformerSelfAttention)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return config, layer


def attend(
    config: LongformerAttentionConfig, layer: LongformerSelfAttention, hidden: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    shared = config.make_shared(SIZES)
    [inputs] = shared(BatchInputs(mask, mask.to(hidden.dtype)[:, None, None, :]))
    with torch.no_grad():
        context, outputs = layer(hidden, inputs)
    assert list(outputs) == [ATTENTION_WEIGHTS]
    return context, outputs[ATTENTION_WEIGHTS]


def dense(config: LongformerAttentionConfig, weights: Tensor, mask: Tensor) -> Array:
    """Return the weights (B, H, T, T) for either form."""
    [output] = config.outputs()
    if output.layout == "dense":
        return weights.numpy()
    assert isinstance(output.pattern, Band)
    rows = zip(weights.numpy(), mask.numpy(), strict=True)
    return np.stack([output.pattern.dense(row, live) for row, live in rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_global", [0, 1, 2, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_weights_and_context_match_the_paper(window: int, num_global: int, form: Form) -> None:
    config, layer = make(window, num_global, form)
    for tokens in WINDOWS[window]:
        mask = masks(tokens)
        hidden = torch.randn(len(mask), tokens, WIDTH, dtype=torch.float64)
        context, rows = attend(config, layer, hidden, mask)
        weights = dense(config, rows, mask)
        for text, live in enumerate(mask.numpy()):
            expected = reference(layer, hidden[text].numpy(), live, window, num_global)
            assert np.abs(context[text].numpy() - expected[0]).max() < 1e-12
            assert np.abs(weights[text] - expected[1]).max() < 1e-12
            # Padding has exactly zero weight as a query and as a key.
            assert not weights[text][:, live == 0].any()
            assert not weights[text][:, :, live == 0].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_sum_to_one_and_are_finite_in_every_dtype(form: Form, dtype: torch.dtype) -> None:
    config, layer = make(4, 3, form)
    layer = layer.to(dtype)
    mask = masks(19)
    context, rows = attend(config, layer, torch.randn(6, 19, WIDTH).to(dtype), mask)
    assert context.dtype == rows.dtype == dtype
    assert context.isfinite().all()
    sums = dense(config, rows.float(), mask).sum(-1)
    expected = mask.numpy()[:, None, :].repeat(HEADS, axis=1)
    assert np.abs(sums - expected).max() < 20 * torch.finfo(dtype).eps
    assert not rows[mask[:, None].expand(rows.shape[:3]) == 0].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_global", [0, 2])
def test_result_is_independent_of_batch_and_padding_side(num_global: int, form: Form) -> None:
    config, layer = make(4, num_global, form)
    for tokens, left, right in product([1, 4, 5, 11], [0, 3, 6], [0, 2, 9]):
        text = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
        mask = torch.ones(1, tokens, dtype=torch.int64)
        alone, alone_rows = attend(config, layer, text, mask)
        hidden = torch.randn(2, left + tokens + right, WIDTH, dtype=torch.float64)
        hidden[0, left : left + tokens] = text[0]
        padded = torch.zeros(2, hidden.shape[1], dtype=torch.int64)
        padded[0, left : left + tokens] = 1
        context, rows = attend(config, layer, hidden, padded)
        span = slice(left, left + tokens)
        assert (context[0, span] - alone[0]).abs().max() < 1e-14
        weights, narrow = dense(config, rows, padded)[0], dense(config, alone_rows, mask)[0]
        assert np.abs(weights[:, span, span] - narrow).max() < 1e-14


def encoder_of(form: Form, num_global: int = 1) -> tuple[EncoderConfig, Encoder]:
    """Return an encoder with two different windows and a layer of full attention."""
    layers = [
        {"kind": "longformer", "num_heads": 4, "window": 3, "num_global_tokens": num_global, "form": form},
        {"kind": "softmax", "num_heads": 4},
        {"kind": "longformer", "num_heads": 6, "window": 33, "num_global_tokens": num_global, "form": form},
    ]
    values = {"num_layers": 3, "positions.max_position_embeddings": 90, "attention": layers}
    config = small_config(values)
    return config, new_encoder(config, seed=0).double()


@pytest.mark.parametrize("num_global", [0, 2])
def test_both_forms_agree_if_windows_differ_between_layers(num_global: int) -> None:
    (config, blocks), (_, whole) = encoder_of("blocks", num_global), encoder_of("dense", num_global)
    for tokens in (1, 3, 4, 32, 33, 34, 65, 90):
        mask = masks(tokens)
        ids = torch.randint(0, 101, mask.shape)
        with torch.no_grad():
            ours, theirs = (encoder(ids, mask, output_attentions=True) for encoder in (blocks, whole))
        live = mask == 1
        assert (ours.last_hidden_state - theirs.last_hidden_state)[live].abs().max() < 1e-12
        for layer, (rows, weights) in enumerate(zip(ours.attentions, theirs.attentions, strict=True)):
            attention = config.layer_attentions[layer]
            if isinstance(attention, LongformerAttentionConfig):
                assert np.abs(dense(attention, rows, mask) - weights.numpy()).max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_dropout_applies_only_in_training_and_not_to_weights(form: Form) -> None:
    config, layer = make(3, 2, form, dropout=0.5)
    hidden, mask = torch.randn(2, 9, WIDTH, dtype=torch.float64), torch.ones(2, 9, dtype=torch.int64)
    context, rows = attend(config, layer, hidden, mask)
    layer.train()
    torch.manual_seed(2)
    dropped, dropped_rows = attend(config, layer, hidden, mask)
    assert torch.equal(rows, dropped_rows)
    changed = (dropped - context).abs().amax(-1)
    # The first two tokens are global.
    assert (changed[:, :2] > 1e-3).all()
    assert (changed[:, 2:] > 1e-3).any()


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_has_a_gradient_and_padding_has_none(form: Form) -> None:
    config, layer = make(4, 2, form)
    mask = masks(13)
    hidden = torch.randn(6, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    [inputs] = config.make_shared(SIZES)(BatchInputs(mask, mask.double()[:, None, None, :]))
    context, outputs = layer(hidden, inputs)
    # Squared, because the sum of each row of weights is constant.
    (context.square().sum() + outputs[ATTENTION_WEIGHTS].square().sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[mask == 0].any()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        # A key bias adds a constant to all scores of a query, which does not change the weights.
        assert (parameter.grad.abs().max() > 1e-9) == (not name.endswith("key.bias"))


def test_no_global_projections_without_global_tokens() -> None:
    names = {name.partition(".")[0] for name, _ in make(3, 0, "blocks")[1].named_parameters()}
    assert names == {"query", "key", "value", "output"}


def test_configuration_describes_its_outputs_and_edges() -> None:
    config, _ = make(40, 2, "blocks")
    [output] = config.outputs()
    assert (output.layout, output.num_heads, output.row_sum) == ("band", HEADS, "one")
    assert output.pattern == Band(40, 2)
    # Two global tokens, one local token and the 40 tokens of its window.
    assert config.edges == (block_size(40), 43) == (32, 43)
    whole, _ = make(40, 2, "dense")
    assert [output.layout for output in whole.outputs()] == ["dense"]
    assert whole.edges == (43,)
    assert (config.reach, whole.reach) == (None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, r"attention\.window=0: must be at least 1"),
        ({"window": 4, "num_global_tokens": -1}, r"attention\.num_global_tokens=-1: must be at least 0"),
        ({"window": 4, "form": "sparse"}, r"form='sparse' is not supported: choose one of blocks, dense"),
        ({"window": 4, "num_heads": 5}, r"num_heads=5 does not divide hidden_size=48"),
    ],
)
def test_invalid_configuration_is_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config({"attention": {"kind": "longformer", "num_heads": 4} | values})


def test_causal_encoder_rejects_it() -> None:
    attention = {"kind": "longformer", "num_heads": 4, "window": 4}
    with pytest.raises(ConfigError, match=r"attention\.kind='longformer': .*is_causal=true"):
        small_config({"is_causal": True, "attention": attention})
