"""Describes an encoder of transformers by its configuration and by trial runs, see `wrap_published`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnlens_model.attention.own_module import OWN_MODULE
from attnlens_model.config import EncoderConfig
from attnlens_model.errors import ConfigError
from attnlens_model.module_encoder import ModuleEncoder
from attnlens_model.published_module import PublishedModule, mask_function

_MAX_LOOKED_UP = 2**14
"""Maximum length at which position embeddings are looked up."""
_MAX_SPARE_ROWS = 1024
_NUM_FOLLOWING = 8
_SAME = 1e-6


class _FirstLayerReached(Exception):  # noqa: N818 - ends a run, no error
    pass


def wrap_published(model: Any, model_type: str) -> ModuleEncoder:  # noqa: ANN401 - a model of transformers
    """Wrap an encoder of transformers, with a configuration derived from its own and from trial runs.

    Args:
        model: `PreTrainedModel` in fp32, on the CPU and in eval mode, with eager attention.
        model_type: `model_type` in its `config.json`.

    Raises:
        ConfigError: The model has no limit of tokens, or see `PublishedModule`.
    """
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError("it takes no token ids")
    settings = model.config.get_text_config()
    if settings.is_encoder_decoder:
        raise ConfigError("it is an encoder-decoder, and transformers loads no encoder alone")
    _check_rotation(settings)
    max_tokens, embeddings = _try_embeddings(model, _stated_limit(settings))
    module = PublishedModule(model, max_tokens).eval()
    module.verify(model.get_input_embeddings().num_embeddings)
    types = getattr(settings, "type_vocab_size", None) if module.takes_types else None
    hidden_size = int(settings.hidden_size)
    parts = _attention_parts(model, len(module.num_heads))
    layers = [
        {"kind": OWN_MODULE, "num_heads": num_heads, "window": window}
        | _describe_heads(part, num_heads, hidden_size)
        for num_heads, window, part in zip(module.num_heads, module.windows, parts, strict=True)
    ]
    pad_token_id = getattr(settings, "pad_token_id", None)
    has_padding = isinstance(pad_token_id, int) and pad_token_id >= 0
    return ModuleEncoder(
        module,
        EncoderConfig.from_dict(
            {
                "family": model_type,
                "hidden_size": hidden_size,
                "output_size": None if module.output_size == hidden_size else module.output_size,
                "num_layers": len(layers),
                "is_causal": module.is_causal,
                "embeddings": {
                    "vocab_size": model.get_input_embeddings().num_embeddings,
                    "pad_token_id": pad_token_id if has_padding else 0,
                    "type_vocab_size": types if isinstance(types, int) and types > 1 else 0,
                },
                "positions": {"max_position_embeddings": max_tokens},
                "attention": layers,
                "feed_forward": {"intermediate_size": _intermediate_size(settings, hidden_size)},
            }
        ),
        f"model.{embeddings}",
    )


def check_direction(model: Any, *, is_causal: bool) -> None:  # noqa: ANN401 - a model of transformers
    """Reject a model whose first token sees the next one in a text with padding, or in one without, alone.

    Without padding, transformers leaves the mask out, and PyTorch's attention function decides.

    Args:
        model: See `wrap_published`.
        is_causal: Whether all layers are causal for texts with padding.

    Raises:
        ConfigError: It does.
    """
    if not getattr(model, "_supports_sdpa", False):
        return
    last = model.get_input_embeddings().num_embeddings - 1
    following = torch.linspace(0, last, _NUM_FOLLOWING).long()
    ids = torch.stack([torch.zeros_like(following), following], dim=1)
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            first = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, 0]
    finally:
        model.set_attn_implementation("eager")
    if torch.allclose(first, first[:1], atol=_SAME) != is_causal:
        raise ConfigError(
            f"it is {'causal' if is_causal else 'bidirectional'} for texts with padding alone: remove "
            "is_causal or use_bidirectional_attention, which contradicts the type, from its config.json"
        )


def _attention_parts(model: nn.Module, num_layers: int) -> Sequence[nn.Module | None]:
    """Return the submodule of each layer that states the size of its heads, if each layer has one."""
    parts = [part for part in model.modules() if isinstance(getattr(part, "head_dim", None), int)]
    return parts if len(parts) == num_layers else [None] * num_layers


def _describe_heads(part: nn.Module | None, num_heads: int, hidden_size: int) -> dict[str, object]:
    head_size, queries_per_key = getattr(part, "head_dim", None), getattr(part, "num_key_value_groups", 1)
    return {
        "head_size": None if head_size == hidden_size // num_heads else head_size,
        "num_key_value_heads": None if queries_per_key == 1 else num_heads // queries_per_key,
    }


def _intermediate_size(settings: Any, hidden_size: int) -> int:  # noqa: ANN401 - a configuration of transformers
    found = (getattr(settings, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    return next((size for size in found if isinstance(size, int)), 4 * hidden_size)


def _check_rotation(settings: Any) -> None:  # noqa: ANN401 - a configuration of transformers
    """Reject rotary embeddings that depend on the longest text of a batch."""
    rotation = getattr(settings, "rope_parameters", None) or {}
    for part in (rotation, *(part for part in rotation.values() if isinstance(part, dict))):
        if part.get("rope_type") == "longrope":
            raise ConfigError("its rotary embeddings (longrope) depend on the longest text of a batch")


def _stated_limit(settings: Any) -> int:  # noqa: ANN401 - a configuration of transformers
    limit = getattr(settings, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError("its config.json states no max_position_embeddings")
    return limit


def _try_embeddings(model: Any, limit: int) -> tuple[int, str]:  # noqa: ANN401 - a model of transformers
    """Return the maximum input length, and the name of the submodule with the input of the first layer.

    If no submodule returns this input, it is that of the token embeddings.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = [child for module in names if isinstance(module, nn.ModuleList) for child in module]
    results: list[tuple[nn.Module, Any]] = []
    found: list[Any] = []

    def reach(_layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found.append(args[0] if args else kwargs.get("hidden_states"))
        raise _FirstLayerReached

    hooks = [layer.register_forward_pre_hook(reach, with_kwargs=True) for layer in layers]
    hooks += [
        module.register_forward_hook(lambda own, _, out: results.append((own, out))) for module in names
    ]

    def fits(length: int) -> bool:
        results.clear()
        ids = torch.full((1, length), model.get_input_embeddings().num_embeddings - 1)
        try:
            with torch.no_grad(), mask_function(lambda **_: torch.zeros(1, 1, 1, 1)):
                model(ids, attention_mask=torch.ones_like(ids))
        except _FirstLayerReached:
            return True
        except (IndexError, RuntimeError):
            return False
        return True

    try:
        looked_up = min(limit, _MAX_LOOKED_UP)
        if not fits(looked_up):
            # Tables of position embeddings may have rows that no token uses.
            lengths = range(looked_up - 1, max(0, looked_up - _MAX_SPARE_ROWS), -1)
            limit = next(filter(fits, lengths), 0)
        if not limit or not fits(min(limit, 2)):
            raise ConfigError("it can't embed a text")
    finally:
        for hook in hooks:
            hook.remove()
    same = [names[module] for module, result in results if found and result is found[-1]]
    return limit, same[-1] if same else names[model.get_input_embeddings()]
