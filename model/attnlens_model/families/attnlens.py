"""Encoders of our own making: any combination of parts, weights named as the encoder names them.

No published family is built so. `config.json` has `"model_type": "attnlens"`, and under `encoder` the keys of
docs/configuration.md; `model.safetensors` is the encoder's `state_dict()`.
"""

from collections.abc import Mapping

from attnlens_model.config_part import flat, nested
from attnlens_model.errors import ConfigError
from attnlens_model.family import Family

_KEY = "encoder"


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    encoder = content.get(_KEY)
    if not isinstance(encoder, Mapping):
        raise ConfigError(f'config.json has no object "{_KEY}": put the keys of docs/configuration.md there')
    return flat(encoder)


def _write_config(values: Mapping[str, object]) -> dict[str, object]:
    # Of patterns, what their first part has is there once more by path.
    patterns = ("attention.", "feed_forward.")
    return {_KEY: nested({path: value for path, value in values.items() if not path.startswith(patterns)})}


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
"""Without a table of names: they are ours."""
