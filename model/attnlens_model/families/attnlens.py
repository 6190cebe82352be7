"""Custom encoders: any combination of parts, with our own parameter names.

`config.json` has `"model_type": "attnlens"` and the keys of docs/configuration.md under `encoder`.
`model.safetensors` is the encoder's `state_dict()`.
"""

from collections.abc import Mapping

from attnlens_model.config_part import flat, nested
from attnlens_model.errors import ConfigError
from attnlens_model.family import Family

_KEY = "encoder"


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    encoder = content.get(_KEY)
    if not isinstance(encoder, Mapping):
        raise ConfigError(f'config.json has no "{_KEY}": add it with the keys of docs/configuration.md')
    return flat(encoder)


def _write_config(values: Mapping[str, object]) -> dict[str, object]:
    # Paths into a pattern repeat the values of its first entry.
    patterns = ("attention.", "feed_forward.")
    return {_KEY: nested({path: value for path, value in values.items() if not path.startswith(patterns)})}


# An empty weight table: checkpoints use our names.
FAMILY = Family(
    name="attnlens",
    model_types=("attnlens",),
    architecture="Encoder",
    read_config=_read_config,
    write_config=_write_config,
    weights={},
    prefixes=("",),
    anchor="embeddings.token.weight",
    roots=("",),
)
