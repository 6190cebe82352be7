"""Reads and writes the pooling settings of sentence-transformers.

`modules.json` lists the modules of a checkpoint. `1_Pooling/config.json` specifies the pooling mode as
`pooling_mode` or, before version 6, as one flag per mode. Dense and Normalize modules may follow.
`truncate_dim`, in the same file as the prompts, is the number of components to keep.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import Pooling, PoolingDefaults
from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json
from attnlens_export.published.classifier import has_head, read_stored_pooling
from attnlens_export.published.dense import read_dense, read_weights, write_dense
from attnlens_export.published.modules import Module, listed_kinds, read_modules, write_modules
from attnlens_export.published.prompts import PROMPTS_FILE

# Pooling names, derived from the protocol's enum.
POOLINGS = {name.removeprefix("POOLING_").lower(): value for name, value in Pooling.items() if value}

# Names used by sentence-transformers, in the order in which it concatenates multiple modes.
_MODES = {
    "cls": Pooling.POOLING_CLS,
    "max": Pooling.POOLING_MAX,
    "mean": Pooling.POOLING_MEAN,
    "mean_sqrt_len_tokens": Pooling.POOLING_MEAN_SQRT_LENGTH,
    "weightedmean": Pooling.POOLING_WEIGHTED_MEAN,
    "lasttoken": Pooling.POOLING_LAST_TOKEN,
}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FLAG_PREFIX = "pooling_mode_"
_REMEDY = f"choose one with --pooling {'|'.join(POOLINGS)}"


def check_pooling_known(directory: Path, pooling: str | None) -> None:
    """Reject a checkpoint that does not specify its pooling, unless a pooling was chosen.

    Raises:
        SourceError: Neither `pooling` nor a Pooling module in `modules.json` specifies the pooling.
    """
    if pooling is None and "Pooling" not in listed_kinds(directory):
        raise SourceError(
            "the checkpoint does not specify its pooling (modules.json with a Pooling module is missing): "
            "choose the pooling that its publisher recommends with `attnlens export --pooling "
            f"{'|'.join(POOLINGS)}`, and add --normalize for embeddings of unit length. Without a "
            "recommendation, the model may not have been trained for embeddings. Token vectors and "
            "attention do not depend on the pooling"
        )


def read_pooling(
    directory: Path | None,
    hidden_size: int,
    pooling: str | None = None,
    normalize: bool | None = None,
    skipped: Collection[str] = (),
) -> PoolingDefaults:
    """Return the pooling settings of a checkpoint, or of a bundle.

    Args:
        directory: Checkpoint or bundle directory. If None, or if `modules.json` is missing, the default is
            mean pooling without normalization.
        hidden_size: Size of the token vectors.
        pooling: One of POOLINGS. If None, the checkpoint's pooling is used.
        normalize: Whether to scale embeddings to length 1. If None, the checkpoint's setting is used.
        skipped: Module kinds to omit.

    Returns:
        The settings. Paths of dense layers are relative to `directory`. `truncate_dim` is 0 if all components
            are kept.

    Raises:
        SourceError: The checkpoint's settings are invalid or not supported by bundles.
        CheckpointError: The weights of a dense layer are missing or corrupt.
    """
    if directory is not None and has_head(directory):
        return read_stored_pooling(directory, hidden_size)
    if pooling is not None and pooling not in POOLINGS:
        raise SourceError(f"unknown pooling {pooling!r}: {_REMEDY}")
    modules = read_modules(directory, skipped)
    settings = _pooling_settings(directory, modules, required=pooling is None)
    defaults = PoolingDefaults(
        pooling=_published(settings) if pooling is None else POOLINGS[pooling],
        exclude_prompt=settings.get("include_prompt") is False,
    )
    width, is_normalized = hidden_size, False
    for module in modules:
        if module.kind == "Normalize":
            is_normalized = True
        elif module.kind == "Dense" and directory is not None:
            layer = read_dense(directory, module.path, width, normalize_input=is_normalized)
            defaults.dense.append(layer)
            width, is_normalized = layer.out_features, False
    defaults.normalize = is_normalized if normalize is None else normalize
    defaults.truncate_dim = _read_truncate_dim(directory, width)
    return defaults


def read_embedding_size(directory: Path, hidden_size: int) -> int:
    """Return the size of a bundle's embeddings before truncation, or its number of labels."""
    layers = read_pooling(directory, hidden_size).dense
    return layers[-1].out_features if layers else hidden_size


def write_pooling(
    directory: Path, source: Path | None, hidden_size: int, defaults: PoolingDefaults, max_tokens: int
) -> None:
    """Write the files that sentence-transformers needs to compute the same embeddings from the bundle.

    The weights of dense layers are read from `source` and written in fp32.
    """
    modules = [Module("Pooling", "1_Pooling")]

    def add(kind: str) -> str:
        modules.append(Module(kind, f"{len(modules) + 1}_{kind}"))
        return modules[-1].path

    if source is not None:
        for layer in defaults.dense:
            if layer.normalize_input:
                add("Normalize")
            write_dense(directory, add("Dense"), layer, read_weights(source, layer))
    if defaults.normalize:
        add("Normalize")
    write_modules(directory, modules)
    mode = next(mode for mode, value in _MODES.items() if value == defaults.pooling)
    settings: dict[str, Any] = {"word_embedding_dimension": hidden_size}
    settings |= {flag: name == mode for flag, name in _FLAGS.items()}
    if defaults.exclude_prompt:
        settings["include_prompt"] = False
    write_json(directory / "1_Pooling" / "config.json", settings)
    sentence_config = read_object(directory / "sentence_bert_config.json")
    write_json(directory / "sentence_bert_config.json", sentence_config | {"max_seq_length": max_tokens})


def _pooling_settings(directory: Path | None, modules: Sequence[Module], *, required: bool) -> dict[str, Any]:
    """Return the configuration of the Pooling module, or an empty dict without a Pooling module."""
    paths = [module.path for module in modules if module.kind == "Pooling"]
    if directory is None or not paths:
        return {}
    path = directory / paths[0] / "config.json"
    if required and not path.is_file():
        raise SourceError(
            f"{path} is missing, although modules.json lists the module: download the file, or {_REMEDY}"
        )
    return read_object(path)


def _read_truncate_dim(directory: Path | None, width: int) -> int:
    """Return the number of embedding components to keep, or 0 to keep all.

    Raises:
        SourceError: The value is not a positive integer.
    """
    stated = read_object(directory / PROMPTS_FILE).get("truncate_dim") if directory else None
    if stated is None:
        return 0
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        raise SourceError(
            f"{PROMPTS_FILE}: truncate_dim is {stated!r}: use an integer from 1 to {width}, or remove "
            "it to keep all components"
        )
    return stated if stated < width else 0


def _published(settings: dict[str, Any]) -> Pooling.ValueType:
    flags = [key for key, value in settings.items() if key.startswith(_FLAG_PREFIX) and value is True]
    known = [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    unknown = [flag.removeprefix(_FLAG_PREFIX) for flag in flags if flag not in _FLAGS]
    modes = settings.get("pooling_mode", known + unknown) or ["mean"]
    names = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    if len(names) != 1 or names[0] not in _MODES:
        raise SourceError(
            f"the checkpoint pools by {' + '.join(names)}, which bundles do not support: {_REMEDY}"
        )
    return _MODES[names[0]]
