"""Every mechanism can be trained: by examples/train_masked.py, with the attention that it gives each kind.

Letters in shapes: B batch, T tokens, D width.
"""

import json

import pytest
import torch
from torch import Tensor

from attnlens_model import ConfigError, Encoder, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.attention.mechanism import BatchInputs, EncoderSizes
from examples.train_masked import (
    CLS,
    MASK,
    NOT_MASKED,
    SEP,
    Sizes,
    Trainer,
    draw_batches,
    make_config,
    mask_tokens,
    read_attention,
)

KINDS = tuple(ATTENTION_KINDS)
# Long enough for blocks that don't see all others.
TINY = Sizes(
    vocab_size=40, hidden_size=24, num_layers=2, num_tokens=64, batch_size=2, steps=20, warm_up=3,
    learning_rate=1e-2,
)  # fmt: skip
PROSE = torch.randint(5, 40, (300,), generator=torch.Generator().manual_seed(0))

# Parameters of a layer without an effect on its context. A bias of keys adds the same number to all scores of
# a query, which softmax takes away again; unless keys also meet distances, or scores are composed of others.
WITHOUT_EFFECT = {
    "softmax": {"key.bias"},
    "disentangled": {"distance_key.bias"},
    "longformer": {"key.bias", "global_key.bias"},
    "big_bird": {"key.bias"},
    "overlapping": {"key.bias"},
    "mixture": {"key.bias"},
    "composed": set(),
}

# Small enough to differentiate numerically, by T and keys. In blocks of 2 with one drawn, 14 tokens see all.
SMALLEST = {
    "longformer": (7, {"window": 1}),
    "big_bird": (17, {"block_size": 2, "table_tokens": 20}),
    "overlapping": (5, {"overlap": 1}),
}


def attention(kind: str, **values: object) -> dict[str, object]:
    return read_attention(json.dumps({"kind": kind} | values))


def fresh_encoder(kind: str, dropout: float) -> Encoder:
    return new_encoder(make_config(attention(kind, dropout=dropout), TINY), seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_can_overfit_a_batch(kind: str) -> None:
    trainer = Trainer(make_config(attention(kind), TINY), TINY)
    batch = next(draw_batches(PROSE, TINY, seed=0))
    losses = [trainer.step(*batch) for _ in range(TINY.steps)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dropped_in_training_alone(kind: str) -> None:
    ids = PROSE[None, : TINY.num_tokens]

    def run(encoder: Encoder) -> Tensor:
        with torch.inference_mode():
            output: Tensor = encoder(ids, torch.ones_like(ids)).last_hidden_state
        return output

    encoder = fresh_encoder(kind, dropout=0.5)
    used = run(encoder)
    assert run(encoder).equal(used)
    encoder.train()
    assert not run(encoder).equal(run(encoder))
    # Training and inference differ only by dropout.
    without = fresh_encoder(kind, dropout=0.0)
    assert run(without.train()).equal(run(without.eval()))
    assert run(without).equal(used)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter_that_has_an_effect(kind: str) -> None:
    encoder = fresh_encoder(kind, dropout=0.0).double()
    # Fresh biases are 0, and would hide a gradient that is a product with one.
    for parameter in encoder.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = PROSE[None, : TINY.num_tokens]
    # Of all tokens, global ones too: in the last layer a masked language model asks for hidden words alone.
    hidden_states: Tensor = encoder(ids, torch.ones_like(ids)).last_hidden_state
    (hidden_states * torch.randn_like(hidden_states)).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    largest = {name: 0.0 if grad is None else grad.abs().max().item() for name, grad in gradients.items()}
    # Values of 0 are within rounding errors of float64.
    assert {name for name, value in largest.items() if value < 1e-12} == {
        f"layers.{layer}.attention.{name}"
        for layer in range(TINY.num_layers)
        for name in WITHOUT_EFFECT[kind]
    }


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_layer_match_finite_differences(kind: str) -> None:
    num_tokens, changes = SMALLEST.get(kind, (5, {}))
    sizes = EncoderSizes(
        hidden_size=8, max_tokens=20, is_causal=False, hidden_dropout=0.0, layer_norm_eps=1e-5
    )
    config = ATTENTION_KINDS[kind].read(attention(kind, **changes), {})
    shared, layer = config.make_shared(sizes).double(), config.make_layer(sizes).double()
    mask = torch.ones(1, num_tokens, dtype=torch.int64)
    mask[0, -1] = 0
    inputs = BatchInputs(mask, mask.double()[:, None, None, :])
    hidden_states = torch.randn(1, num_tokens, 8, dtype=torch.float64, requires_grad=True)

    def attend(hidden_states: Tensor, *_parameters: Tensor) -> tuple[Tensor, ...]:
        context, outputs = layer(hidden_states, *shared(inputs))
        return context, *outputs.values()

    parameters = [*shared.parameters(), *layer.parameters()]
    assert torch.autograd.gradcheck(attend, (hidden_states, *parameters), fast_mode=True)


def test_fifteen_percent_of_the_words_are_hidden_and_nothing_else() -> None:
    texts = torch.randint(5, 40, (200, 100), generator=torch.Generator().manual_seed(1))
    texts[:, 0], texts[:, -1] = CLS, SEP
    input_ids, labels = mask_tokens(texts, 40, torch.Generator().manual_seed(2))
    is_hidden = labels != NOT_MASKED
    assert labels[is_hidden].equal(texts[is_hidden])
    assert input_ids[~is_hidden].equal(texts[~is_hidden])
    assert not is_hidden[:, [0, -1]].any()
    assert is_hidden[:, 1:-1].double().mean() == pytest.approx(0.15, abs=0.01)
    now = input_ids[is_hidden]
    assert (now == MASK).double().mean() == pytest.approx(0.8, abs=0.02)
    # 10 % are drawn, one of 35 of them as it was.
    assert (now == texts[is_hidden]).double().mean() == pytest.approx(0.1 + 0.1 / 35, abs=0.02)


def test_unknown_kind_is_rejected_with_those_that_are_known() -> None:
    known = ", ".join(KINDS)
    with pytest.raises(ConfigError, match=rf"kind='linear' is not supported: choose one of {known}"):
        make_config(read_attention("linear"), TINY)
    with pytest.raises(ConfigError, match=r"\{'kind': 1\} is not JSON"):
        read_attention("{'kind': 1}")
