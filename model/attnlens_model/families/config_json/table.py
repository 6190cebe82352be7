"""`ConfigTable`: a bidirectional mapping between a family's `config.json` and `EncoderConfig`.

`EncoderConfig` values are addressed by path, such as `attention.num_heads`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnlens_model.config_part import check_size
from attnlens_model.errors import ConfigError, suggestion

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
WRITTEN_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


Keys = Mapping[str, tuple[str, object]]
"""Maps a path in `EncoderConfig` to the key in a `config.json` and its default. None: the key is required."""


@dataclass(frozen=True)
class ConfigTable:
    """The keys of one family's Hugging Face `config.json`.

    Attributes:
        keys: See `Keys`.
        pad_token_id: Default if `pad_token_id` is missing or null.
        activation: Key of the activation, and its default.
        implied: Fixed values by path, which the family's `config.json` does not contain.
        required_values: Maps a key to its supported values. If they include None, the key may be absent.
    """

    keys: Keys
    pad_token_id: int = 0
    activation: tuple[str, str] = ("hidden_act", "gelu")
    implied: Mapping[str, object] = field(default_factory=dict)
    required_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def read(self, content: Mapping[str, object]) -> dict[str, object]:
        """Return the `EncoderConfig` values, by path, that the content of a `config.json` specifies.

        Raises:
            ConfigError: A key is missing, has an unsupported value, or is a size that exceeds its limit.
        """
        for key, accepted in self.required_values.items():
            if content.get(key) not in accepted:
                raise ConfigError(f"{key}={content.get(key)!r} is not supported: only {accepted[0]!r} is")
        missing = [key for key, default in self.keys.values() if default is None and key not in content]
        if missing:
            raise ConfigError(
                f"config.json does not specify {', '.join(missing)}: add the value used in training"
            )
        fields = {ours: content.get(theirs, default) for ours, (theirs, default) in self.keys.items()}
        for path, value in fields.items():
            check_size(path, value, self.keys[path][0])
        pad_token_id = content.get("pad_token_id")
        return {
            "attention.kind": "softmax",
            **fields,
            **self.implied,
            "feed_forward.activation": self._read_activation(content),
            "embeddings.pad_token_id": self.pad_token_id if pad_token_id is None else pad_token_id,
        }

    def write(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return the content of a `config.json` for `EncoderConfig` values; the inverse of `read`.

        Values without a key are lost. The caller detects this by reading the result.
        """
        return {
            **{theirs: values[ours] for ours, (theirs, _) in self.keys.items() if ours in values},
            **{key: accepted[0] for key, accepted in self.required_values.items()},
            self.activation[0]: WRITTEN_ACTIVATIONS[str(values["feed_forward.activation"])],
            "pad_token_id": values["embeddings.pad_token_id"],
        }

    def _read_activation(self, content: Mapping[str, object]) -> str:
        key, default = self.activation
        name = str(content.get(key, default))
        if name not in _ACTIVATIONS:
            supported = ", ".join(_ACTIVATIONS)
            raise ConfigError(
                f"{key}={name!r} is not supported{suggestion(name, _ACTIVATIONS)}: choose one of {supported}"
            )
        return _ACTIVATIONS[name]


def unusual_head_size(stated: object, fields: Mapping[str, object]) -> object:
    """Return the head size `stated`, or None if it equals the default of `EncoderConfig`."""
    num_heads = fields["attention.num_heads"]
    is_usual = (
        isinstance(stated, int) and isinstance(num_heads, int) and stated * num_heads == fields["hidden_size"]
    )
    return None if is_usual else stated
