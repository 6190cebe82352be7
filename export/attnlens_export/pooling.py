"""How token vectors become one vector: read from, and written for, sentence-transformers.

A checkpoint of sentence-transformers lists its modules in `modules.json`; `1_Pooling/config.json` says how to
pool, as `pooling_mode` or, before version 6, as a flag for each mode.
"""

from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import Pooling, PoolingDefaults
from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_json, read_object, write_json
from attnlens_model import EncoderConfig

POOLINGS = {"mean": Pooling.POOLING_MEAN, "cls": Pooling.POOLING_CLS, "max": Pooling.POOLING_MAX}

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HOW_TO_GO_ON = "choose one with --pooling mean|cls|max, which leaves that out of the bundle"


def read_pooling(directory: Path | None, pooling: str | None, normalize: bool | None) -> PoolingDefaults:
    """Decide the pooling of a checkpoint.

    Args:
        directory: the checkpoint; None, or one without `modules.json`, means mean and not normalized.
        pooling: "mean", "cls" or "max" instead of what the checkpoint says; None: as it says.
        normalize: likewise for scaling to length 1.

    Raises:
        SourceError: the checkpoint pools in a way that a bundle can't express, and `pooling` is None.
    """
    modules = _read_modules(directory)
    if pooling is None:
        pooling = _published_pooling(directory, modules)
    if normalize is None:
        normalize = "Normalize" in modules
    return PoolingDefaults(pooling=POOLINGS[pooling], normalize=normalize)


def write_pooling(directory: Path, config: EncoderConfig, defaults: PoolingDefaults, max_tokens: int) -> None:
    """Write the files by which sentence-transformers opens the bundle with the same pooling."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    if defaults.normalize:
        kinds.append(("Normalize", "2_Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    name = next(name for name, value in POOLINGS.items() if value == defaults.pooling)
    flags = {flag: mode == name for flag, mode in _FLAGS.items()}
    write_json(directory / "modules.json", modules)
    write_json(
        directory / "1_Pooling" / "config.json", {"word_embedding_dimension": config.hidden_size, **flags}
    )
    sentence_config = read_object(directory / "sentence_bert_config.json")
    write_json(directory / "sentence_bert_config.json", sentence_config | {"max_seq_length": max_tokens})


def _read_modules(directory: Path | None) -> dict[str, str]:
    """Return the path of each module by the last part of its type."""
    if directory is None or not (directory / "modules.json").exists():
        return {}
    modules: Any = read_json(directory / "modules.json")
    try:
        return {str(entry["type"]).rpartition(".")[2]: str(entry["path"]) for entry in modules}
    except (TypeError, KeyError) as error:
        raise SourceError(f"{directory / 'modules.json'} is not a list of modules: {error!r}") from error


def _published_pooling(directory: Path | None, modules: dict[str, str]) -> str:
    unknown = set(modules) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise SourceError(
            f"the checkpoint applies {', '.join(sorted(unknown))} to its vectors, which a bundle can't: "
            f"{_HOW_TO_GO_ON}"
        )
    if directory is None or "Pooling" not in modules:
        return "mean"
    path = directory / modules["Pooling"] / "config.json"
    if not path.is_file():
        raise SourceError(f"{path} is absent although modules.json names it: fetch it, or {_HOW_TO_GO_ON}")
    settings = read_object(path)
    modes = settings.get("pooling_mode", [mode for flag, mode in _FLAGS.items() if settings.get(flag)])
    modes = modes or ["mean"]
    names = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise SourceError(
            f"the checkpoint pools by {' + '.join(names)}, which a bundle can't: {_HOW_TO_GO_ON}"
        )
    return names[0]
