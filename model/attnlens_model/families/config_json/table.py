"""How a family's `config.json` says what `EncoderConfig` says: a table that is read in both directions.

Our values are named by their paths in an `EncoderConfig`, such as `attention.num_heads`.
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


@dataclass(frozen=True)
class ConfigTable:
    """The keys of one family's Hugging Face `config.json`.

    Attributes:
        keys: our path -> (their key, what their class takes when the key is absent; None: it must be there).
        pad_token_id: what an absent or null `pad_token_id` means.
        activation: their key of the activation, and what an absent one means.
        implied: our values by path that this family does not write down, since they are always the same.
        required_values: their key -> the only values that mean the encoder built here. None: may be absent.
    """

    keys: Mapping[str, tuple[str, object]]
    pad_token_id: int = 0
    activation: tuple[str, str] = ("hidden_act", "gelu")
    implied: Mapping[str, object] = field(default_factory=dict)
    required_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def read(self, content: Mapping[str, object]) -> dict[str, object]:
        """Turn the content of a `config.json` into values of an `EncoderConfig` by path.

        Raises:
            ConfigError: a key is missing, has a value that this encoder does not implement, or is a size
                that is too large.
        """
        for key, accepted in self.required_values.items():
            if content.get(key) not in accepted:
                raise ConfigError(f"{key}={content.get(key)!r} is not supported: only {accepted[0]!r} is")
        missing = [key for key, default in self.keys.values() if default is None and key not in content]
        if missing:
            raise ConfigError(
                f"config.json does not say {', '.join(missing)}: add what the model was trained with"
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
        """Return the content of a `config.json` for the values of an `EncoderConfig`; the inverse of `read`.

        Only what has a key can be written: the caller finds a difference by reading the result.
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
                f"{key}={name!r} is not supported{suggestion(name, _ACTIVATIONS)}: this version knows "
                f"{supported}"
            )
        return _ACTIVATIONS[name]


def unusual_head_size(stated: object, fields: Mapping[str, object]) -> object:
    """Return a stated width of a head, or None where it is what `EncoderConfig` takes by itself."""
    num_heads = fields["attention.num_heads"]
    is_usual = (
        isinstance(stated, int) and isinstance(num_heads, int) and stated * num_heads == fields["hidden_size"]
    )
    return None if is_usual else stated
