"""`EncoderConfig`: sizes and parts of an encoder, validated on construction."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.attention.mechanism import AttentionConfig, AttentionOutput, EncoderSizes
from attnlens_model.attention.own_module import OWN_MODULE, OwnModuleAttentionConfig
from attnlens_model.config_part import ConfigPart, flat, nested
from attnlens_model.convolution import ConvolutionConfig
from attnlens_model.embeddings import EmbeddingsConfig, PositionsConfig
from attnlens_model.errors import ConfigError
from attnlens_model.families import FAMILIES, family_named, family_of_config
from attnlens_model.feed_forward import FeedForwardConfig
from attnlens_model.norm import NormConfig

PUBLISHED_KEY = "attnlens_encoder"
"""Key in a bundle's `config.json` for the description of a module of transformers."""

_Part = TypeVar("_Part")

_OWN_FAMILY = "attnlens"
# Keys of nearly every Hugging Face config.json that are not keys of our own format.
_PUBLISHED_KEYS = (
    *("architectures", "transformers_version", "torch_dtype", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ConfigPart):
    """Sizes and parts of an encoder.

    Attributes:
        family: Family of checkpoints, which determines tensor names; a key of
            `attnlens_model.families.FAMILIES`. For a module of transformers, its `model_type`.
        hidden_size: Hidden size D.
        output_size: Size of the projection (without bias) after the last layer. If None, hidden states are
            not projected.
        num_layers: Number of layers L.
        num_hidden_groups: Number of layers with their own weights. Each is applied
            num_layers / num_hidden_groups consecutive times. If None, weights are not shared.
        is_causal: Whether a token only attends to itself and preceding tokens.
        hidden_dropout: Dropout probability of layer outputs in training.
        embeddings: Token and token type embeddings.
        positions: Position embeddings.
        attention: Attention mechanism of all layers, or a repeating pattern: layer i has entry i modulo the
            pattern length.
        feed_forward: Feed-forward network of all layers, or a repeating pattern.
        norm: Norms.
        convolution: Convolution in parallel to the first layer, if any.

    Raises:
        ConfigError: A value has the wrong type or is out of range. Also a ValueError.
    """

    family: str = "bert"
    hidden_size: int
    output_size: int | None = None
    num_layers: int
    num_hidden_groups: int | None = None
    is_causal: bool = False
    hidden_dropout: float = 0.1
    embeddings: EmbeddingsConfig
    positions: PositionsConfig
    attention: AttentionConfig | tuple[AttentionConfig, ...]
    feed_forward: FeedForwardConfig | tuple[FeedForwardConfig, ...]
    norm: NormConfig = field(default_factory=NormConfig)
    convolution: ConvolutionConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Normalize patterns so that equal encoders have equal configurations.
        object.__setattr__(self, "attention", _shortest_pattern(self.layer_attentions))
        object.__setattr__(self, "feed_forward", _shortest_pattern(self.layer_feed_forwards))

    def _check(self) -> None:
        for name in ("hidden_size", "num_layers"):
            self.require(name, getattr(self, name) >= 1, "must be at least 1")
        size = self.output_size
        self.require("output_size", size is None or size >= 1, "must be at least 1, or null")
        self.require("hidden_dropout", 0 <= self.hidden_dropout < 1, "must be at least 0 and less than 1")
        self._check_layers()
        lowest = self.embeddings.pad_token_id + 2
        limit = f"must be at least pad_token_id + 2 = {lowest}: positions are counted from pad_token_id + 1"
        self.positions.require("max_position_embeddings", self.max_tokens >= 1, limit)
        for attention in dict.fromkeys(self.layer_attentions):
            attention.check_sizes(self.sizes)
        if self.convolution is not None:
            self.convolution.check_sizes(self.hidden_size)
        if not self.has_own_module:
            family_named(self.family)

    def _check_layers(self) -> None:
        groups, limit = self.num_hidden_groups, f"must not be longer than num_layers={self.num_layers}"
        self.require("attention", len(_pattern(self.attention)) <= self.num_layers, limit)
        self.require("feed_forward", len(_pattern(self.feed_forward)) <= self.num_layers, limit)
        divides = groups is None or (groups >= 1 and self.num_layers % groups == 0)
        self.require("num_hidden_groups", divides, f"must divide num_layers={self.num_layers}, or be null")
        limit = (
            "must be null if norm.placement is 'pre' or 'both': the first layer may differ from the others"
        )
        are_alike = self.norm.placement in ("post", "post_twice")
        self.require("num_hidden_groups", groups is None or are_alike, limit)
        for name, layers in (
            ("attention", self.layer_attentions),
            ("feed_forward", self.layer_feed_forwards),
        ):
            limit = f"must be null if {name} differs between layers"
            self.require("num_hidden_groups", groups is None or len(set(layers)) == 1, limit)

    @property
    def layer_attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each of the L layers."""
        return _repeated(self.attention, self.num_layers)

    @property
    def layer_feed_forwards(self) -> tuple[FeedForwardConfig, ...]:
        """The feed-forward network of each of the L layers."""
        return _repeated(self.feed_forward, self.num_layers)

    @property
    def vector_size(self) -> int:
        """Size V of the token vectors that the encoder returns."""
        return self.output_size or self.hidden_size

    @property
    def intermediate_size(self) -> int:
        """The largest intermediate size of the feed-forward networks, or of their experts."""
        return max(feed_forward.intermediate_size for feed_forward in self.layer_feed_forwards)

    def layer_outputs(self, layer: int) -> tuple[AttentionOutput, ...]:
        """Return the additional outputs of attention in layer `layer` (0-based), in order."""
        return self.layer_attentions[layer].outputs()

    @property
    def num_heads(self) -> int:
        """The largest number of heads of any layer."""
        return max(attention.num_heads for attention in self.layer_attentions)

    @property
    def max_tokens(self) -> int:
        """Maximum input length in tokens, including special tokens."""
        is_offset = self.positions.scheme == "padding_offset"
        unused = self.embeddings.pad_token_id + 1 if is_offset else 0
        return self.positions.max_position_embeddings - unused

    @property
    def num_distinct_layers(self) -> int:
        """Number of layers with their own weights: L unless weights are shared."""
        return self.num_hidden_groups or self.num_layers

    @property
    def times_in_a_row(self) -> int:
        """How often each layer with its own weights is applied: once unless weights are shared."""
        return self.num_layers // self.num_distinct_layers

    @property
    def sizes(self) -> EncoderSizes:
        """The encoder settings that attention depends on."""
        return EncoderSizes(
            hidden_size=self.hidden_size,
            max_tokens=self.max_tokens,
            is_causal=self.is_causal,
            hidden_dropout=self.hidden_dropout,
            layer_norm_eps=self.norm.eps,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Create a configuration from our own keys, or from the content of a Hugging Face `config.json`.

        The latter is recognized by its `model_type` and converted by the family.

        Raises:
            ConfigError: A key is unknown or missing, `model_type` is not supported, or a value is invalid.
        """
        described = values.get(PUBLISHED_KEY)
        if isinstance(described, Mapping):
            values = described
        elif "model_type" in values:
            family = family_of_config(values)
            values = nested(family.read_config(values) | {"family": family.name})
        if values.get("per_layer_input", ...) is None:  # a setting of earlier versions
            values = {key: value for key, value in values.items() if key != "per_layer_input"}
        published = next((key for key in values if key in _PUBLISHED_KEYS), None)
        if published is not None:
            known = ", ".join(sorted({name for family in FAMILIES.values() for name in family.model_types}))
            raise ConfigError(
                f"{published} is a key of a Hugging Face config.json, which must also have a model_type: "
                f'add, for example, "model_type": "bert" (one of {known}), or use the keys of '
                "docs/configuration.md"
            )
        return cls.read(values, {AttentionConfig: {**ATTENTION_KINDS, OWN_MODULE: OwnModuleAttentionConfig}})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create a configuration from JSON text; the inverse of `to_json`.

        Raises:
            ConfigError: The text is not a JSON object. See also `from_dict`.
        """
        try:
            values = json.loads(text)
        # JSON integers with thousands of digits also raise ValueError.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the configuration is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"the configuration is a JSON {type(values).__name__}: it must be an object")
        return cls.from_dict(values)

    @property
    def has_own_module(self) -> bool:
        """Whether this describes a module of a user or of transformers, see `ModuleEncoder`."""
        return any(attention.kind == OWN_MODULE for attention in self.layer_attentions)

    @property
    def is_published_module(self) -> bool:
        """Whether this describes a module of transformers, see `PublishedModule`."""
        return self.has_own_module and self.family != _OWN_FAMILY

    def to_json(self) -> str:
        """Return the configuration as JSON text with our own keys."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def by_path(self) -> dict[str, object]:
        """Return all values by path, such as `norm.eps`. A pattern of parts is one value."""
        return flat(dataclasses.asdict(self))

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of the family's Hugging Face `config.json`.

        Values that the family does not support are lost. Call `from_dict` on the result to detect this.
        """
        if self.is_published_module:
            return {"model_type": self.family, PUBLISHED_KEY: dataclasses.asdict(self)}
        family = family_named(self.family)
        names = {"architectures": [family.architecture], "model_type": family.model_types[0]}
        values = self.by_path()
        for name, parts in (("attention", self.attention), ("feed_forward", self.feed_forward)):
            pattern = [dataclasses.asdict(part) for part in _pattern(parts)]
            values |= flat(pattern[0], name) | {name: pattern}
        return names | family.write_config(values)


def read_config(path: str | Path) -> EncoderConfig:
    """Read a configuration file: our own JSON or a Hugging Face `config.json`.

    Raises:
        ConfigError: The file is missing or unreadable. See also `EncoderConfig.from_dict`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the path of a JSON file") from error
    try:
        return EncoderConfig.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _pattern(parts: _Part | tuple[_Part, ...]) -> tuple[_Part, ...]:
    return parts if isinstance(parts, tuple) else (parts,)


def _repeated(parts: _Part | tuple[_Part, ...], num_layers: int) -> tuple[_Part, ...]:
    """Return the part of each layer by repeating the pattern."""
    pattern = _pattern(parts)
    return tuple(pattern[layer % len(pattern)] for layer in range(num_layers))


def _shortest_pattern(layers: tuple[_Part, ...]) -> _Part | tuple[_Part, ...]:
    """Return the shortest repeating pattern of the layers, or a single part if all layers are equal."""
    length = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return layers[:length] if length > 1 else layers[0]
