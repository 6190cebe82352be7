"""`ModuleEncoder`: a module of a user or of transformers, with the interface of `Encoder`.

B batch, T tokens, D hidden size, H heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, Outputs
from attnlens_model.attention.own_module import OWN_MODULE
from attnlens_model.config import EncoderConfig
from attnlens_model.encoder import EncoderOutput
from attnlens_model.errors import ConfigError
from attnlens_model.portable_functions import PortableFunctions

MODULE_PREFIX = "module."
"""Prefix of the names of the parameters of the user's module."""

_NUM_RESULTS, _HIDDEN_AXES, _WEIGHT_AXES = 2, 3, 4
_MAX_TRIAL_TOKENS = 1024


class ModuleEncoder(nn.Module):
    """A module with the interface of `Encoder`.

    Attributes:
        config: Configuration that describes the module.
        module: The module. It maps token ids (B, T), an attention mask (B, T), 1 for tokens and 0 for
            padding, and token types (B, T) if the configuration has several, to hidden states (B, T, D) and
            the attention weights of each layer, (B, H, T, T).
        embeddings: Name of the submodule that returns token embeddings, (B, T, any size).
    """

    def __init__(self, module: nn.Module, config: EncoderConfig, embeddings: str) -> None:
        super().__init__()
        self.config, self.module, self.embeddings = config, module, embeddings
        self.layers = nn.ModuleList(_Layer() for _ in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Run the module. See `Encoder.forward`."""
        inputs = [input_ids, attention_mask]
        if token_type_ids is not None and self.config.embeddings.type_vocab_size:
            inputs.append(token_type_ids)
        functions = PortableFunctions() if torch.compiler.is_exporting() else nullcontext()
        with functions, _calls_of([self.module.get_submodule(self.embeddings)]) as calls:
            hidden_states, weights = self.module(*inputs)
        outputs = tuple(
            layer(hidden_states, each)[1] for layer, each in zip(self.layers, weights, strict=True)
        )
        _module, _arguments, embedded = calls[0]
        return EncoderOutput(hidden_states, outputs if output_attentions else (), embedded)


class _Layer(nn.Module):
    """Attaches the role to the weights of a layer. Hooks of this module observe them."""

    def forward(self, hidden_states: Tensor, weights: Tensor) -> tuple[Tensor, Outputs]:
        return hidden_states, {ATTENTION_WEIGHTS: weights}


_Call = tuple[nn.Module, tuple[Any, ...], Any]


@contextmanager
def _calls_of(modules: list[nn.Module]) -> Iterator[list[_Call]]:
    """Record the module, arguments and result of each call."""
    calls: list[_Call] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], result: object) -> None:
        calls.append((module, arguments, result))

    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def wrap_module(
    module: nn.Module,
    *,
    vocab_size: int,
    max_tokens: int,
    pad_token_id: int = 0,
    is_causal: bool = False,
    embeddings: str | None = None,
) -> ModuleEncoder:
    """Wrap a module, with a configuration derived from the shapes of its results.

    Args:
        module: The module, in eval mode. See `ModuleEncoder.module`.
        vocab_size: Number of token ids.
        max_tokens: Maximum input length in tokens.
        pad_token_id: Token id for padding.
        is_causal: Whether tokens only attend to themselves and preceding tokens.
        embeddings: Name of the submodule that returns token embeddings. By default, the `nn.Embedding` that
            is called with the token ids.

    Raises:
        ConfigError: The module fails, its results do not have these shapes, or there are no embeddings.
    """
    _check_module(module, vocab_size, max_tokens)
    length = min(3, max_tokens)
    input_ids = torch.arange(2 * length).reshape(2, length) % vocab_size
    names = {each: name for name, each in module.named_modules()}
    with _calls_of([each for each in names if isinstance(each, nn.Embedding)]) as calls:
        hidden_states, weights = _results(module, input_ids)
    found = (names[each] for each, arguments, _ in calls if torch.equal(arguments[0], input_ids))
    embeddings = next(found, None) if embeddings is None else embeddings
    if embeddings is None or embeddings not in names.values():
        problem = "calls no nn.Embedding with input_ids" if embeddings is None else f"has no {embeddings!r}"
        raise ConfigError(
            f"{type(module).__name__} {problem}: pass embeddings=NAME, the name in named_modules() of the "
            "submodule that returns token embeddings"
        )
    # The largest token id, at the maximum length unless the weights would take too much memory.
    _results(module, torch.full((1, min(max_tokens, _MAX_TRIAL_TOKENS)), vocab_size - 1))
    hidden_size = hidden_states.shape[-1]
    config = EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": hidden_size,
            "num_layers": len(weights),
            "is_causal": is_causal,
            "embeddings": {"vocab_size": vocab_size, "pad_token_id": pad_token_id, "type_vocab_size": 0},
            "positions": {"max_position_embeddings": max_tokens},
            "attention": [{"kind": OWN_MODULE, "num_heads": each.shape[1]} for each in weights],
            "feed_forward": {"intermediate_size": 4 * hidden_size},
        }
    )
    return ModuleEncoder(module, config, embeddings)


def _check_module(module: nn.Module, vocab_size: int, max_tokens: int) -> None:
    for name, value in (("vocab_size", vocab_size), ("max_tokens", max_tokens)):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    for name, parameter in module.named_parameters():
        if (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
            raise ConfigError(
                f"{type(module).__name__}: {name} is {parameter.dtype} on {parameter.device}: move the "
                "module with float() and cpu()"
            )


def _results(module: nn.Module, input_ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a module and check its results: hidden states and the attention weights of each layer."""
    name, shape = type(module).__name__, tuple(input_ids.shape)
    if module.training:
        raise ConfigError(f"{name} is in training mode: call eval() first")
    try:
        with torch.no_grad():
            result = module(input_ids, torch.ones_like(input_ids))
    except Exception as error:
        raise ConfigError(
            f"{name}(input_ids, attention_mask) failed for int64 tensors of shape {shape}: "
            f"{type(error).__name__}: {error}"
        ) from error
    is_pair = isinstance(result, tuple) and len(result) == _NUM_RESULTS
    hidden_states, weights = result if is_pair else (result, None)
    expected = f"{name}(input_ids, attention_mask) must return"
    if not (
        isinstance(hidden_states, Tensor)
        and hidden_states.ndim == _HIDDEN_AXES
        and hidden_states.shape[:2] == shape
    ):
        raise ConfigError(
            f"{expected} hidden states (batch, tokens, hidden size), not {_shape(hidden_states)} for {shape}"
        )
    if not (isinstance(weights, (list, tuple)) and weights):
        raise ConfigError(
            f"{expected} two results, the second a list with the attention weights of each layer, not "
            f"{_shape(weights)}"
        )
    for layer, each in enumerate(weights):
        if not (
            isinstance(each, Tensor)
            and each.ndim == _WEIGHT_AXES
            and each.shape[::2] == shape
            and each.shape[3] == shape[1]
        ):
            raise ConfigError(
                f"{expected} attention weights (batch, heads, tokens, tokens), but those of layer {layer} "
                f"are {_shape(each)}. Call nn.MultiheadAttention with average_attn_weights=False"
            )
    return hidden_states, tuple(weights)


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
