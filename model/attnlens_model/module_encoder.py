"""`ModuleEncoder`: a module that the user has written, with the interface of `Encoder`."""

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, Outputs
from attnlens_model.config import EncoderConfig
from attnlens_model.encoder import EncoderOutput
from attnlens_model.errors import ConfigError

_NUM_RESULTS, _HIDDEN_AXES, _WEIGHT_AXES = 2, 3, 4


class _Layer(nn.Module):
    """Attaches the role to the weights of a layer. Hooks of this module observe them."""

    def forward(self, hidden_states: Tensor, weights: Tensor) -> tuple[Tensor, Outputs]:
        return hidden_states, {ATTENTION_WEIGHTS: weights}


class ModuleEncoder(nn.Module):
    """A user's module with the interface of `Encoder`.

    Attributes:
        config: Configuration that describes the module.
        module: The module. It maps token ids (B, T) and an attention mask (B, T), 1 for tokens and 0 for
            padding, to hidden states (B, T, D) and a list with the weights of each layer (B, H, T, T).
    """

    def __init__(self, module: nn.Module, config: EncoderConfig) -> None:
        super().__init__()
        self.config, self.module = config, module
        self.layers = nn.ModuleList(_Layer() for _ in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Run the module. See `Encoder.forward`."""
        del token_type_ids
        hidden_states, weights = self.module(input_ids, attention_mask)
        outputs = tuple(
            layer(hidden_states, each)[1] for layer, each in zip(self.layers, weights, strict=True)
        )
        return EncoderOutput(hidden_states, outputs if output_attentions else (), hidden_states)


def describe_module(
    module: nn.Module, *, vocab_size: int, max_tokens: int, pad_token_id: int = 0, is_causal: bool = False
) -> EncoderConfig:
    """Return the configuration that describes a module, from the shapes of its results.

    Args:
        module: The module, in eval mode. See `ModuleEncoder.module`.
        vocab_size: Number of token ids.
        max_tokens: Maximum input length in tokens.
        pad_token_id: Token id for padding.
        is_causal: Whether tokens only attend to themselves and preceding tokens.

    Raises:
        ConfigError: The module fails, or its results do not have these shapes.
    """
    length = min(3, max_tokens)
    input_ids, mask = torch.ones(2, length, dtype=torch.int64), torch.ones(2, length, dtype=torch.int64)
    try:
        with torch.no_grad():
            result = module(input_ids, mask)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__}(input_ids, attention_mask) failed for int64 tensors of shape "
            f"{(2, length)}: {type(error).__name__}: {error}"
        ) from error
    is_pair = isinstance(result, tuple) and len(result) == _NUM_RESULTS
    hidden_states, weights = result if is_pair else (result, None)
    _require(
        isinstance(hidden_states, Tensor) and hidden_states.ndim == _HIDDEN_AXES,
        module,
        f"hidden states (batch, tokens, hidden size), but got {_shape(hidden_states)}",
    )
    _require(
        isinstance(weights, (list, tuple)) and len(weights) > 0,
        module,
        f"a list with the attention weights of each layer as the second result, but got {_shape(weights)}",
    )
    for layer, each in enumerate(weights or ()):
        _require(
            isinstance(each, Tensor) and each.ndim == _WEIGHT_AXES and each.shape[2:] == (length, length),
            module,
            f"attention weights (batch, heads, tokens, tokens), but those of layer {layer} are {_shape(each)}"
            ". For nn.MultiheadAttention, use need_weights=True and average_attn_weights=False",
        )
    hidden_size = hidden_states.shape[-1]
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": hidden_size,
            "num_layers": len(weights or ()),
            "is_causal": is_causal,
            "embeddings": {"vocab_size": vocab_size, "pad_token_id": pad_token_id, "type_vocab_size": 0},
            "positions": {"max_position_embeddings": max_tokens},
            "attention": [{"kind": "own_module", "num_heads": each.shape[1]} for each in weights or ()],
            "feed_forward": {"intermediate_size": 4 * hidden_size},
        }
    )


def _require(holds: bool, module: nn.Module, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{type(module).__name__}(input_ids, attention_mask) must return {expected}")


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
