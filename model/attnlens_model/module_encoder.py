"""`ModuleEncoder`: a module of a user or of transformers, with the interface of `Encoder`.

B batch, T tokens, D hidden size, H heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, Outputs
from attnlens_model.attention.own_module import OWN_MODULE
from attnlens_model.config import EncoderConfig
from attnlens_model.encoder import EncoderOutput
from attnlens_model.errors import ConfigError
from attnlens_model.portable_functions import PortableFunctions, RecordedAttention

MODULE_PREFIX = "module."
"""Prefix of the names of the parameters of the user's module."""

_NAME_EMBEDDINGS = (
    "pass embeddings=NAME, the name in named_modules() of the submodule that returns token embeddings"
)
_NUM_RESULTS, _HIDDEN_AXES, _WEIGHT_AXES = 2, 3, 4
_MAX_TRIAL_TOKENS = 1024
_NUM_ENCODER_ARGUMENTS = 4


class ModuleEncoder(nn.Module):
    """A module with the interface of `Encoder`.

    Attributes:
        config: Configuration that describes the module.
        module: The module. It maps token ids (B, T), an attention mask (B, T), 1 for tokens and 0 for
            padding, and token types (B, T) if the configuration has several, to hidden states (B, T, D) and
            the attention weights of each layer, (B, H, T, T). If it returns hidden states alone, the weights
            are those of its calls of `nn.MultiheadAttention`, in order.
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
            hidden_states, weights = _call(self.module, inputs, RecordedAttention())
        outputs = tuple(
            layer(hidden_states, each)[1] for layer, each in zip(self.layers, weights, strict=True)
        )
        _module, _arguments, embedded = calls[0]
        return EncoderOutput(hidden_states, outputs if output_attentions else (), embedded)


class _Layer(nn.Module):
    """Attaches the role to the weights of a layer. Hooks of this module observe them."""

    def forward(self, hidden_states: Tensor, weights: Tensor) -> tuple[Tensor, Outputs]:
        return hidden_states, {ATTENTION_WEIGHTS: weights}


def _call(module: nn.Module, inputs: list[Tensor], recorded: RecordedAttention) -> Any:  # noqa: ANN401 - as the module
    """Call a module. Weights that it does not return are those of `nn.MultiheadAttention`."""

    def keep_mask(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        # By default, it compares its mask with the causal one, which can't be traced and changes nothing.
        if len(args) < _NUM_ENCODER_ARGUMENTS:
            kwargs["is_causal"] = bool(kwargs.get("is_causal"))
        return args, kwargs

    encoders = (each for each in module.modules() if isinstance(each, nn.TransformerEncoder))
    hooks = [each.register_forward_pre_hook(keep_mask, with_kwargs=True) for each in encoders]
    try:
        with recorded:
            result = module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return (result, recorded.weights) if isinstance(result, Tensor) and recorded.weights else result


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
    named = dict(module.named_modules())
    if embeddings is not None and embeddings not in named:
        raise ConfigError(f"{type(module).__name__} has no {embeddings!r}: {_NAME_EMBEDDINGS}")
    tables: list[nn.Module] = [each for each in named.values() if isinstance(each, nn.Embedding)]
    with _calls_of(tables if embeddings is None else [named[embeddings]]) as calls:
        hidden_states, weights = _results(module, input_ids)
    if embeddings is None:
        table = _find_table(type(module).__name__, calls, input_ids)
        embeddings = next(name for name, each in named.items() if each is table)
    elif not any(_is_of_tokens(result, input_ids) for _module, _arguments, result in calls):
        raise ConfigError(
            f"{type(module).__name__}.{embeddings} returns no embeddings (batch, tokens, size): "
            f"{_NAME_EMBEDDINGS}"
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


def _find_table(name: str, calls: Sequence[_Call], input_ids: Tensor) -> nn.Module:
    """Return the `nn.Embedding` that was called with the token ids."""
    given = [(module, arguments[0]) for module, arguments, _result in calls]
    found = [module for module, ids in given if torch.equal(ids, input_ids)]
    if found:
        return found[0]
    if any(torch.equal(ids, input_ids.mT) for _module, ids in given):
        raise ConfigError(
            f"{name} calls nn.Embedding with input_ids transposed: call it with input_ids, and transpose its "
            "result"
        )
    raise ConfigError(f"{name} calls no nn.Embedding with input_ids: {_NAME_EMBEDDINGS}")


def _is_of_tokens(result: object, input_ids: Tensor) -> bool:
    return isinstance(result, Tensor) and result.ndim == _HIDDEN_AXES and result.shape[:2] == input_ids.shape


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
    recorded, problem = RecordedAttention(), None
    try:
        with torch.no_grad():
            result = _call(module, [input_ids, torch.ones_like(input_ids)], recorded)
    except Exception as error:  # noqa: BLE001 - a module of the user
        problem = error
    if shape[0] != shape[1] and shape in recorded.axes:
        raise ConfigError(
            f"{name} calls nn.MultiheadAttention with texts and tokens exchanged, so texts would attend to "
            "each other: its inputs are (tokens, batch, size), or (batch, tokens, size) with batch_first=True"
        ) from problem
    if problem is not None:
        raise ConfigError(
            f"{name}(input_ids, attention_mask) failed for int64 tensors of shape {shape}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    is_pair = isinstance(result, tuple) and len(result) == _NUM_RESULTS
    hidden_states, weights = result if is_pair else (result, None)
    expected = f"{name}(input_ids, attention_mask) must return"
    if not _is_of_tokens(hidden_states, input_ids):
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
