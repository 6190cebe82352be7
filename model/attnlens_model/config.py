"""The one description of an encoder: its sizes and choices, validated when it is made."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

from attnlens_model.errors import ConfigError, suggestion
from attnlens_model.families import FAMILIES, family_named, family_of_model_type

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
POSITION_SCHEMES = ("absolute", "padding_offset", "none")
NORMS = ("layer", "rms")
NORM_PLACEMENTS = ("post", "pre")
FEED_FORWARDS = ("plain", "gated")
_CHOICES = {
    "activation": ACTIVATIONS,
    "position_scheme": POSITION_SCHEMES,
    "norm": NORMS,
    "norm_placement": NORM_PLACEMENTS,
    "feed_forward": FEED_FORWARDS,
    "disentangled_attention": ("none", "c2p", "p2c", "c2p|p2c"),
    "embedding_projection": ("after_norm", "before_norm"),
    "conv_activation": (*ACTIVATIONS, "tanh"),
}

_FEWEST_BUCKETS = 4
# Choices that disentangled attention does not know; each must be as it is by default.
_NOT_DISENTANGLED = (
    *("rotary_theta", "head_size", "num_key_value_heads", "attention_scale", "attention_bias"),
    "relative_attention_num_buckets",
)
# Choices that only disentangled attention knows.
_DISENTANGLED = ("distance_buckets", "max_relative_positions", "share_att_key", "distance_norm")

# Found in nearly every Hugging Face config.json, and none of our own keys.
_PUBLISHED_KEYS = (
    *("architectures", "transformers_version", "torch_dtype", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes and choices of an encoder.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: D, the width of a token vector; a multiple of `num_heads` where `head_size` is null.
        num_layers: L.
        num_heads: H.
        intermediate_size: width of the feed-forward layer's middle.
        max_position_embeddings: the number of positions, learned or computed; `max_tokens` says how many are
            usable.
        family: whose tensor names its checkpoints use; one of `attnlens_model.families.FAMILIES`.
        type_vocab_size: number of token types; 0 means that there are none and that the encoder takes no
            `token_type_ids`, 1 that every token has the same and that none need to be given.
        activation: "gelu" (exact, by erf), "gelu_tanh" (its tanh approximation), "relu" or "silu".
        layer_norm_eps: added to the variance (or mean square) in every norm.
        pad_token_id: the id that fills a batch up. The encoder itself goes by the attention mask alone.
        position_scheme: which position embedding a token gets. "absolute": that of its place in the row,
            padding included. "padding_offset": of the n-th token that is no padding, row pad_token_id + n.
            "none": none is added; positions reach the encoder through its attention, if at all.
        embedding_size: E, the width of the embeddings, which a projection brings to `hidden_size`; None means
            that they are `hidden_size` wide and are not projected.
        num_hidden_groups: how many layers have weights of their own; each is applied
            num_layers / num_hidden_groups times in a row. None means all.
        relative_attention_num_buckets: how many learned biases each head adds to its scores, chosen by the
            distance of key and query and shared by all layers; 0 means none.
        relative_attention_max_distance: from this distance on all share the last bucket.
        is_causal: whether a token sees only itself and those before it.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm, which has a weight alone).
        norm_bias: whether a LayerNorm has a bias; of no effect for "rms".
        norm_placement: "post": a norm after each residual sum. "pre": a norm before attention and
            feed-forward, and one after the last layer; attention of the first layer has none where the
            embeddings were just normalised.
        embedding_norm: whether the embeddings are normalised.
        attention_bias: whether the projections to queries, keys, values and output have biases.
        feed_forward: "plain": down(activation(up(x))). "gated": down(activation(gate(x)) * up(x)).
        up_bias: whether the feed-forward's projections up (and gate) have biases.
        down_bias: whether its projection down has one.
        head_size: K, the width of one head; None means hidden_size / num_heads.
        num_key_value_heads: how many heads keys and values have, each shared by equally many consecutive
            heads of queries; None means `num_heads`.
        attention_scale: what the dot products of queries and keys are multiplied by; None means 1 / sqrt(K).
        rotary_theta: base of the wavelengths by which queries and keys are rotated; None means that they are
            not.
        rotary_divisor: what every rotation's frequency is divided by.
        local_window: in a local layer a token sees the keys at most so many places away; None means that all
            layers are global.
        global_every_n_layers: layers 0, n, 2n ... are global, the others local.
        local_rotary_theta: `rotary_theta` of the local layers, not divided; None means that all layers rotate
            alike.
        disentangled_attention: which terms of their distance are added to the score of two tokens: "c2p",
            "p2c", "c2p|p2c" (disentangled.py) or "none".
        distance_buckets: half as many distances are told apart one by one, the others by as many buckets; 0:
            all up to `max_relative_positions` one by one.
        max_relative_positions: from this distance on all are alike; null means `max_position_embeddings`.
        share_att_key: whether distances are projected as content is; else they have projections of their own.
        distance_norm: whether the distances' embeddings go through a LayerNorm.
        embedding_projection: "after_norm", with a bias, or "before_norm", without.
        conv_kernel_size: how many embeddings a convolution beside the first layer joins; 0 means none.
        conv_groups: in how many groups it splits their components.
        conv_activation: as `activation`, or "tanh".
        hidden_dropout: probability of dropping an element of a layer's output, in training.
        attention_dropout: probability of dropping an attention weight, in training.

    Raises:
        ConfigError: (a ValueError) a value has the wrong type or is out of range.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    family: str = "bert"
    type_vocab_size: int = 2
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    is_causal: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    position_scheme: str = "absolute"
    embedding_size: int | None = None
    num_hidden_groups: int | None = None
    relative_attention_num_buckets: int = 0
    relative_attention_max_distance: int = 128
    norm: str = "layer"
    norm_bias: bool = True
    norm_placement: str = "post"
    embedding_norm: bool = True
    attention_bias: bool = True
    feed_forward: str = "plain"
    up_bias: bool = True
    down_bias: bool = True
    head_size: int | None = None
    num_key_value_heads: int | None = None
    attention_scale: float | None = None
    rotary_theta: float | None = None
    rotary_divisor: float = 1.0
    local_window: int | None = None
    global_every_n_layers: int = 1
    local_rotary_theta: float | None = None
    disentangled_attention: str = "none"
    distance_buckets: int = 0
    max_relative_positions: int | None = None
    share_att_key: bool = False
    distance_norm: bool = False
    embedding_projection: str = "after_norm"
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_activation: str = "tanh"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        self._check_ranges()
        self._check_parts()
        self._check_attention()
        self._check_rotation()
        self._check_distances()
        self._check_convolution()
        family_named(self.family)

    @property
    def head_dim(self) -> int:
        """K, the width of one head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def max_tokens(self) -> int:
        """The longest input in tokens, special tokens included."""
        is_offset = self.position_scheme == "padding_offset"
        return self.max_position_embeddings - (self.pad_token_id + 1 if is_offset else 0)

    @property
    def num_distinct_layers(self) -> int:
        """The number of layers with weights of their own: L unless layers share them."""
        return self.num_hidden_groups or self.num_layers

    @property
    def farthest_distance(self) -> int:
        """From this distance on all are alike to disentangled attention."""
        stated = self.max_relative_positions
        return self.max_position_embeddings if stated is None else stated

    def is_local(self, layer: int) -> bool:
        """Whether a token sees only its neighbourhood in layer `layer`, counted from 0."""
        return self.local_window is not None and layer % self.global_every_n_layers != 0

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Make a configuration from our own keys, or from the content of a Hugging Face `config.json`.

        The latter is recognised by its `model_type` and read by that family's mapping.

        Raises:
            ConfigError: an unknown or missing key, an unsupported `model_type`, or a bad value.
        """
        if "model_type" in values:
            family = family_of_model_type(str(values["model_type"]), values.get("architectures"))
            values = family.read_config(values) | {"family": family.name}
        return cls(**_checked_keys(cls, values))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a configuration from JSON text; the inverse of `to_json`.

        Raises:
            ConfigError: not a JSON object, or as `from_dict`.
        """
        try:
            values = json.loads(text)
        # A ValueError also for a number of thousands of digits.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the configuration is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"the configuration is a JSON {type(values).__name__}: it must be an object")
        return cls.from_dict(values)

    def to_json(self) -> str:
        """Return the configuration as JSON text with our own keys."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of the family's Hugging Face `config.json`.

        Fields that the family does not know are lost; `from_dict` of the result shows it.
        """
        family = family_named(self.family)
        names = {"architectures": [family.architecture], "model_type": family.model_types[0]}
        return names | family.write_config(dataclasses.asdict(self))

    def _check_types(self) -> None:
        for name, wanted in get_type_hints(type(self)).items():
            value = getattr(self, name)
            accepted = get_args(wanted) or (wanted,)
            # `isinstance` would take True for an int; an int is welcome where a float is meant.
            if type(value) not in ((*accepted, int) if float in accepted else accepted):
                kind = getattr(wanted, "__name__", str(wanted))
                raise ConfigError(f"{name}={value!r} is {type(value).__name__}: it must be {kind}")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
            _require(self, name, getattr(self, name) >= 1, "must be at least 1")
        _require(self, "max_position_embeddings", self.max_position_embeddings >= 1, "must be at least 1")
        _require(self, "type_vocab_size", self.type_vocab_size >= 0, "must be at least 0 (0: no token types)")
        if self.head_size is None and self.hidden_size % self.num_heads:
            divisors = [heads for heads in range(1, self.hidden_size + 1) if self.hidden_size % heads == 0]
            closest = min(divisors, key=lambda heads: abs(heads - self.num_heads))
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}: "
                f"the nearest that does is {closest}"
            )

    def _check_ranges(self) -> None:
        limit = self.vocab_size - 1
        _require(
            self,
            "pad_token_id",
            0 <= self.pad_token_id <= limit,
            f"must be from 0 to vocab_size - 1 = {limit}",
        )
        _require(
            self,
            "layer_norm_eps",
            _is_positive(self.layer_norm_eps),
            "must be greater than 0, for example 1e-12",
        )
        for name in ("hidden_dropout", "attention_dropout"):
            _require(self, name, 0 <= getattr(self, name) < 1, "must be at least 0 and less than 1")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name}={value!r} is not supported{suggestion(value, known)}: choose one of "
                    f"{', '.join(known)}"
                )

    def _check_parts(self) -> None:
        _require(
            self,
            "max_position_embeddings",
            self.max_tokens >= 1,
            f"must be at least pad_token_id + 2 = {self.pad_token_id + 2}, since positions are counted from "
            "pad_token_id + 1",
        )
        size, groups = self.embedding_size, self.num_hidden_groups
        _require(self, "embedding_size", size is None or size >= 1, "must be at least 1, or null")
        _require(
            self,
            "num_hidden_groups",
            groups is None or (groups >= 1 and self.num_layers % groups == 0),
            f"must divide num_layers={self.num_layers}, or be null",
        )
        buckets = self.relative_attention_num_buckets
        _require(
            self,
            "relative_attention_num_buckets",
            buckets == 0 or (buckets >= _FEWEST_BUCKETS and buckets % 2 == 0),
            f"must be even and at least {_FEWEST_BUCKETS}, or 0 (no relative bias)",
        )
        _require(
            self,
            "relative_attention_max_distance",
            self.relative_attention_max_distance > buckets // 4,
            f"must be greater than relative_attention_num_buckets / 4 = {buckets // 4}",
        )

    def _check_attention(self) -> None:
        for name in ("head_size", "local_window"):
            value = getattr(self, name)
            _require(self, name, value is None or value >= 1, "must be at least 1, or null")
        _require(self, "global_every_n_layers", self.global_every_n_layers >= 1, "must be at least 1")
        shared = self.num_key_value_heads
        _require(
            self,
            "num_key_value_heads",
            shared is None or (shared >= 1 and self.num_heads % shared == 0),
            f"must divide num_heads={self.num_heads}, or be null",
        )
        _require(
            self,
            "num_hidden_groups",
            self.num_hidden_groups is None or self.norm_placement == "post",
            "must be null where norm_placement='pre', whose first layer is unlike the others",
        )

    def _check_rotation(self) -> None:
        for name in ("attention_scale", "rotary_theta", "local_rotary_theta"):
            value = getattr(self, name)
            _require(self, name, value is None or _is_positive(value), "must be greater than 0, or null")
        _require(self, "rotary_divisor", _is_positive(self.rotary_divisor), "must be greater than 0")
        _require(
            self,
            "rotary_theta",
            self.rotary_theta is None or self.head_dim % 2 == 0,
            f"must be null for heads of the odd width {self.head_dim}: rotation pairs the components",
        )

    def _check_distances(self) -> None:
        is_chosen = self.disentangled_attention != "none"
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _NOT_DISENTANGLED if is_chosen else _DISENTANGLED:
            place = f"where disentangled_attention={self.disentangled_attention!r}"
            limit = f"must be {json.dumps(defaults[name])} {place}"
            _require(self, name, getattr(self, name) == defaults[name], limit)
        farthest, middle = self.farthest_distance, self.distance_buckets // 2
        _require(self, "max_relative_positions", farthest >= 1, "must be at least 1, or null")
        is_usable = self.distance_buckets == 0 or 1 <= middle < farthest - 1
        limit = (
            f"must be 0 (no buckets), or at least 2 and less than 2 * (max_relative_positions={farthest} - 1)"
        )
        _require(self, "distance_buckets", is_usable, limit)

    def _check_convolution(self) -> None:
        size, groups = self.conv_kernel_size, self.conv_groups
        is_usable = size == 0 or (size > 0 and size % 2 == 1)
        _require(self, "conv_kernel_size", is_usable, "must be odd, or 0 (no convolution)")
        divides = groups >= 1 and self.hidden_size % groups == 0
        _require(self, "conv_groups", divides, f"must divide hidden_size={self.hidden_size}")


def read_config(path: str | Path) -> EncoderConfig:
    """Read a configuration file: our own JSON or a Hugging Face `config.json`.

    Raises:
        ConfigError: the file is absent or unreadable, or as `EncoderConfig.from_dict`.
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


def _checked_keys(cls: type[EncoderConfig], values: Mapping[str, object]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    published = next((key for key in values if key in _PUBLISHED_KEYS), None)
    if published is not None:
        known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.model_types))
        raise ConfigError(
            f"{published} is a key of a Hugging Face config.json, which must state its model_type too: add, "
            f'for instance, "model_type": "bert" (one of {known}), or use the keys of docs/configuration.md'
        )
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"unknown key {key!r}{suggestion(key, fields)}: the keys are those of docs/configuration.md, "
                "or those of a Hugging Face config.json with its model_type"
            )
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"missing {', '.join(missing)}: a configuration must say {', '.join(required)}")
    return dict(values)


def _is_positive(value: float) -> bool:
    # An int may be larger than any float.
    return 0 < value <= sys.float_info.max


def _require(config: EncoderConfig, name: str, holds: bool, limit: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r}: {limit}")
