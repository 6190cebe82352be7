"""Shared by tests of several mechanisms: attention in float64 numpy with loops and -inf, and inputs."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens_model import AttentionMask, EncoderConfig, new_encoder
from attnlens_model.attention.mechanism import EncoderSizes
from attnlens_model.attention.parts.masks import prepare_mask

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def sizes(width: int) -> EncoderSizes:
    """Return the sizes of an encoder, of which a layer uses only the width."""
    return EncoderSizes(width, max_tokens=40, is_causal=False, hidden_dropout=0.0, layer_norm_eps=1e-12)


def numbers(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def linear(layer: nn.Linear, rows: Array) -> Array:
    """Output size of the layer."""
    product = rows @ numbers(layer.weight).T
    return product if layer.bias is None else product + numbers(layer.bias)


def softmax(scores: Array) -> Array:
    """Return the softmax over the last axis, or 0 if all entries are -inf."""
    highest = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isinf(highest), 0.0, highest))
    total = exponentials.sum(axis=-1, keepdims=True)
    return np.asarray(exponentials / np.where(total == 0, 1.0, total))


def split(rows: Array, num_heads: int) -> Array:
    """(B, T, D) -> (B, H, T, K)."""
    return rows.reshape(*rows.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)


def scores_of(query: Array, key: Array, keep: BoolArray, scale: float | None = None) -> Array:
    """(B, H, T, K) twice -> (B, H, T, T), -inf at masked keys; `keep` is (B, T)."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = np.einsum("bhik,bhjk->bhij", query, key) * scale
    return np.where(keep[:, None, None, :], scores, -np.inf)


def randomised(module: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Return the module in float64 and eval mode, with random parameters, including biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module.double().eval()


def padded(batch: int, tokens: int) -> dict[str, BoolArray]:
    """Return masks (B, T): no padding, right, left, in the middle, and all padding."""
    right = np.arange(tokens)[None] < np.linspace(1, tokens, batch).astype(int)[:, None]
    holes = np.arange(batch * tokens).reshape(batch, tokens) % 3 != 1
    empty = right.copy()
    empty[0] = False
    return {
        "full": np.ones((batch, tokens), dtype=bool),
        "right": right,
        "left": right[:, ::-1].copy(),
        "middle": holes,
        "empty": empty,
    }


PADDINGS = tuple(padded(1, 1))


def mask_of(keep: BoolArray) -> AttentionMask:
    return prepare_mask(torch.from_numpy(keep)[:, None, None, :], torch.float64)


def hidden(batch: int, tokens: int, width: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, generator=generator, dtype=torch.float64)


def largest_difference(found: Tensor, expected: Array, keep: BoolArray | None = None) -> float:
    """Return the largest difference over all tokens, or over the non-padding tokens of (B, T, ...)."""
    error = np.abs(found.detach().numpy() - expected)
    return float((error if keep is None else error[keep]).max(initial=0.0))


def check_row_alone(config: EncoderConfig) -> None:
    """All outputs of all layers are the same for a padded text and the text alone."""
    encoder = new_encoder(config, seed=2).double()
    ids = torch.randint(0, 101, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2] = 0
    with torch.no_grad():
        together = encoder(ids, mask, output_attentions=True)
        alone = encoder(ids[1:2, :6], mask[1:2, :6], output_attentions=True)
    assert (together.last_hidden_state[1, :6] - alone.last_hidden_state[0]).abs().max() < 1e-12
    for number, (layer, own) in enumerate(zip(together.layers, alone.layers, strict=True)):
        assert list(layer) == [output.role for output in config.layer_outputs(number)]
        for output in config.layer_outputs(number):
            whole = layer[output.role]
            if output.layout == "dense":
                assert not whole[1, :, :, 6:].any()
                assert not whole[2].any()
                whole = whole[:, :, :, :6].transpose(1, 2)
            expected = own[output.role][0]
            expected = expected.transpose(0, 1) if output.layout == "dense" else expected
            assert (whole[1, :6] - expected).abs().max() < 1e-12


def check_dropout(make: Callable[[float], nn.Module], width: int) -> None:
    """It is active in training, but does not affect returned weights."""
    torch.manual_seed(0)
    module, rows, mask = make(0.5), hidden(2, 7, width), mask_of(padded(2, 7)["right"])
    module = randomised(module)
    context, outputs = module(rows, mask)
    assert torch.equal(module(rows, mask)[0], context)
    dropped, same = module.train()(rows, mask)
    assert (dropped - context).abs().max() > 1e-3
    assert list(outputs) == list(same)
    for role, tensor in outputs.items():
        assert torch.equal(tensor, same[role])


def check_gradients(module: nn.Module, width: int) -> None:
    """Run torch.autograd.gradcheck on the context and all outputs, for inputs and all parameters.

    The fast mode compares a random projection of the Jacobian, which takes two runs per tensor.
    """
    module, mask = randomised(module), mask_of(padded(2, 3)["right"])
    names = [name for name, _ in module.named_parameters()]

    def run(rows: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, parameters, strict=True))
        context, outputs = torch.func.functional_call(module, values, (rows, mask))
        return (context, *outputs.values())

    parameters = [parameter.detach().requires_grad_() for parameter in module.parameters()]
    rows = hidden(2, 3, width).requires_grad_()
    assert torch.autograd.gradcheck(run, (rows, *parameters), fast_mode=True)
