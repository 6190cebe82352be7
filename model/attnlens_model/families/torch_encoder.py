"""Encoders written with `torch.nn.TransformerEncoder`, with token and position embeddings.

`config.json` has `"model_type": "torch_encoder"` and the arguments of `nn.TransformerEncoderLayer`, with the
defaults of PyTorch. The weights are the `state_dict()` of the user's module. Names of tensors outside
`nn.TransformerEncoder` are not known in advance, so embeddings are found by their shapes, or by the names in
the key `tensors`.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from attnlens_model.errors import CheckpointError, ConfigError
from attnlens_model.families.config_json.rotary import as_mapping
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, Parameters, linear_and_norm_names

POSITIONS = ("learned", "sinusoidal", "none")
_TENSOR_KEYS = ("encoder", "token", "position", "embedding_norm")
_ANCHOR = "layers.0.self_attn.in_proj_weight"

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("d_model", None),
        "num_layers": ("num_layers", None),
        "attention.num_heads": ("nhead", None),
        "positions.max_position_embeddings": ("max_position_embeddings", None),
        "feed_forward.intermediate_size": ("dim_feedforward", 2048),
        "norm.eps": ("layer_norm_eps", 1e-5),
        "hidden_dropout": ("dropout", 0.1),
        "is_causal": ("is_causal", False),
        "embeddings.norm": ("embedding_norm", False),
    },
    activation=("activation", "relu"),
    implied={"embeddings.type_vocab_size": 0},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    """Return the `EncoderConfig` values, by path.

    Raises:
        ConfigError: A key is unknown, missing or invalid.
    """
    stated = as_mapping(content.get("tensors"), "tensors")
    if unknown := [name for name in stated if name not in _TENSOR_KEYS]:
        raise ConfigError(f"tensors.{unknown[0]} is not supported: use {', '.join(_TENSOR_KEYS)}")
    positions = content.get("position_embedding", "learned")
    if positions not in POSITIONS:
        raise ConfigError(
            f"position_embedding={positions!r} is not supported: choose one of {', '.join(POSITIONS)}"
        )
    is_scaled, has_bias = _flag(content, "scale_embeddings"), _flag(content, "bias", default=True)
    is_first, has_norm = _flag(content, "norm_first"), _flag(content, "final_norm")
    fields = _CONFIG.read(content)
    hidden_size = fields["hidden_size"]
    if is_scaled and isinstance(hidden_size, int) and hidden_size > 0:
        fields["embeddings.scale"] = math.sqrt(hidden_size)
    return fields | {
        "attention.dropout": fields["hidden_dropout"],
        "attention.bias": has_bias,
        "feed_forward.up_bias": has_bias,
        "feed_forward.down_bias": has_bias,
        "norm.bias": has_bias,
        "norm.placement": "pre" if is_first else "post",
        "norm.first_layer": is_first,
        "norm.final": has_norm,
        "positions.scheme": "none" if positions == "none" else "absolute",
    }


def _flag(content: Mapping[str, object], key: str, *, default: bool = False) -> bool:
    value = content.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} is not supported: it must be true or false")
    return value


def _write_config(values: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a `config.json`; the inverse of `_read_config`."""
    return _CONFIG.write(values) | {
        "position_embedding": "none" if values["positions.scheme"] == "none" else "learned",
        "scale_embeddings": values["embeddings.scale"] != 1.0,
        "bias": values["attention.bias"],
        "norm_first": values["norm.placement"] == "pre",
        "final_norm": bool(
            values["norm.placement"] == "pre" if values["norm.final"] is None else values["norm.final"]
        ),
    }


def _prepare(tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> Mapping[str, Tensor]:
    """Return the tensors under the names of this family, with a position table unless there are no positions.

    Raises:
        CheckpointError: There is no encoder, or an embedding table is missing or ambiguous.
    """
    search = _Search(tensors, as_mapping(content.get("tensors"), "tensors"))
    vocab_size, hidden_size, num_positions = (
        int(str(content[key])) for key in ("vocab_size", "d_model", "max_position_embeddings")
    )
    names = {name.removeprefix(search.prefix): name for name in tensors if name.startswith(search.layers)}
    for kind in ("weight", "bias"):
        names[f"final_norm.{kind}"] = f"{search.prefix}norm.{kind}"
        if content.get("embedding_norm"):
            names[f"embedding_norm.{kind}"] = norm = (
                f"{search.stated.get('embedding_norm', 'embedding_norm')}.{kind}"
            )
            if kind == "weight" and norm not in tensors:
                raise CheckpointError(
                    f"the weights contain no tensor {norm}: set tensors.embedding_norm in config.json to the "
                    "name of the norm of the embeddings, or embedding_norm to false"
                )
    token = search.find("token", lambda shape, _name: shape == (vocab_size, hidden_size))
    if token is None:
        raise CheckpointError(
            f"no tensor has the shape {(vocab_size, hidden_size)} of the token embeddings: correct "
            "vocab_size and d_model in config.json, or set tensors.token to the name of the table"
        )
    names["token.weight"] = token

    def is_position_table(shape: tuple[int, ...], name: str) -> bool:
        # An output layer also has rows of the hidden size.
        is_other = name == token or (shape[:1] == (vocab_size,) and "pos" not in name.lower())
        return shape[1:] == (hidden_size,) and shape[0] >= num_positions and not is_other

    extra: dict[str, Tensor] = {}
    position = None
    scheme = content.get("position_embedding", "learned")
    if scheme != "none":
        position = search.find("position", is_position_table)
        if position is not None:
            extra["position.weight"] = tensors[position].reshape(-1, hidden_size)[:num_positions]
        elif scheme == "sinusoidal":
            extra["position.weight"] = sinusoidal_positions(num_positions, hidden_size)
        else:
            raise CheckpointError(
                f"no tensor has {num_positions} or more rows of {hidden_size} numbers for position.weight: "
                "correct max_position_embeddings in config.json, set tensors.position to the name of the "
                'table, or set position_embedding to "sinusoidal" or "none"'
            )
    names = {ours: theirs for ours, theirs in names.items() if theirs in tensors}
    others = {name: name for name in tensors if name not in {*names.values(), position}}
    return _Renamed(tensors, others | names, extra)


class _Search:
    """Finds the encoder and the embedding tables among the tensors of a user's module."""

    def __init__(self, tensors: Mapping[str, Tensor], stated: Mapping[str, object]) -> None:
        self._tensors, self.stated = tensors, stated
        found = sorted(name.removesuffix(_ANCHOR) for name in tensors if name.endswith(_ANCHOR))
        if "encoder" in stated:
            found = [f"{str(stated['encoder']).rstrip('.')}."]
        if len(found) != 1 or f"{found[0]}{_ANCHOR}" not in tensors:
            raise CheckpointError(
                f"{len(found)} encoders have a tensor {_ANCHOR}, with the prefixes {found}: set "
                "tensors.encoder in config.json to the name of the nn.TransformerEncoder in the state_dict"
            )
        self.prefix = found[0]
        self.layers = f"{self.prefix}layers."

    def find(self, key: str, fits: Callable[[tuple[int, ...], str], bool]) -> str | None:
        """Return the name of an embedding table, or None if no tensor fits.

        Args:
            key: Key in `tensors` of config.json.
            fits: Function of the shape and the name. Axes of length 1 are omitted, because position tables
                often have one for the batch.

        Raises:
            CheckpointError: The stated tensor does not exist, or several tensors fit.
        """
        if key in self.stated:
            name = str(self.stated[key])
            if name not in self._tensors:
                raise CheckpointError(
                    f"tensors.{key} is {name!r}, but the weights contain no such tensor: correct config.json"
                )
            return name
        outside = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(self.layers)}
        shapes = {name: tuple(size for size in tensor.shape if size != 1) for name, tensor in outside.items()}
        found = [name for name, shape in shapes.items() if fits(shape, name)]
        named = [name for name in found if "emb" in name.lower() or "pos" in name.lower()]
        found = named if len(found) > 1 and named else found
        if len(found) > 1:
            raise CheckpointError(
                f"{', '.join(found)} have the shape of the {key} embeddings: set tensors.{key} in "
                "config.json to one of them"
            )
        return found[0] if found else None


class _Renamed(Mapping[str, Tensor]):
    """Tensors under other names, which are read on access, and tensors in memory."""

    def __init__(
        self, tensors: Mapping[str, Tensor], names: Mapping[str, str], extra: Mapping[str, Tensor]
    ) -> None:
        self._tensors, self._names, self._extra = tensors, names, extra

    def __getitem__(self, name: str) -> Tensor:
        return self._extra[name] if name in self._extra else self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._extra]))

    def __len__(self) -> int:
        return len({*self._names, *self._extra})


def sinusoidal_positions(num_positions: int, hidden_size: int) -> Tensor:
    """Return the position table of Vaswani et al. 2017, section 3.5, (positions, hidden size) float32.

    Even components are sines and odd components cosines of position / 10000^(2i / hidden size).
    """
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64) / hidden_size
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * 10_000.0**-exponents
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    return table[:, :hidden_size].float()


def _projections(kind: str) -> tuple[str, ...]:
    return tuple(f"layers.{{layer}}.attention.{name}.{kind}" for name in ("query", "key", "value"))


_WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "token.weight",
    "embeddings.position.weight": "position.weight",
    _projections("weight"): "layers.{layer}.self_attn.in_proj_weight",
    _projections("bias"): "layers.{layer}.self_attn.in_proj_bias",
    **linear_and_norm_names(
        {
            "embeddings.norm": "embedding_norm",
            "layers.{layer}.attention.output": "layers.{layer}.self_attn.out_proj",
            "layers.{layer}.attention_norm": "layers.{layer}.norm1",
            "layers.{layer}.feed_forward.up": "layers.{layer}.linear1",
            "layers.{layer}.feed_forward.down": "layers.{layer}.linear2",
            "layers.{layer}.output_norm": "layers.{layer}.norm2",
            "final_norm": "final_norm",
        }
    ),
}

FAMILY = Family(
    name="torch_encoder",
    model_types=("torch_encoder",),
    architecture="TransformerEncoder",
    read_config=_read_config,
    write_config=_write_config,
    weights=_WEIGHTS,
    prefixes=("",),
    anchor=_ANCHOR,
    roots=("layers.", "token.", "position.", "embedding_norm.", "final_norm."),
    prepare=_prepare,
)
