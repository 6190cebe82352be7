"""Rejects settings in a publisher's files that bundles do not support.

sentence-transformers reads more settings than a bundle can express, and each release adds some. Each table
lists the keys that it reads from one file, with a rule for the supported values. All other keys and values
are errors, because ignoring them would change the results without notice. A value of null counts as absent.
"""

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_json, read_object
from attnlens_export.published.modules import MODULES_FILE, Module, read_list
from attnlens_export.published.prompts import PROMPTS_FILE
from attnlens_export.published.side_files import find_sentence_config, read_sentence_config

Task = Literal["feature-extraction", "sequence-classification"]
"""What sentence-transformers computes: embeddings, or the logits of a classifier or reranker."""

Rule = Callable[[str, Any], Iterator[tuple[str, object]]]
"""Maps the path and value of a setting to the unsupported settings in it."""


def _read(_path: str, _value: object) -> Iterator[tuple[str, object]]:
    """Accept any value: the setting has its own reader, or does not affect the results."""
    yield from ()


def _one_of(*values: object) -> Rule:
    def rule(path: str, value: object) -> Iterator[tuple[str, object]]:
        if value is not None and value not in values:
            yield path, value

    return rule


def _flag(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Accept true and false. Null is an error: sentence-transformers treats it as false."""
    if not isinstance(value, bool):
        yield path, value


def _limit(path: str, value: object) -> Iterator[tuple[str, object]]:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        yield path, value


def _repeats(known: Mapping[str, object], ignored: Collection[str] = ()) -> Rule:
    """Accept an object whose entries repeat values that apply anyway.

    Args:
        known: Values that apply without the setting.
        ignored: Entries that do not affect the results.
    """

    def rule(path: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in ignored and (key not in known or known[key] != item):
                    yield f"{path}.{key}", item
        elif value is not None:
            yield path, value

    return rule


def _torch_class(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Accept classes of PyTorch. sentence-transformers replaces other activations by tanh."""
    if not str(value).startswith("torch."):
        yield path, value


_null = _one_of()
_FLAGS = (True, False)

MODULE_KEYS: Mapping[str, Mapping[str, Rule]] = {
    "Pooling": {
        "embedding_dimension": _read,
        "word_embedding_dimension": _read,
        "pooling_mode": _read,
        "pooling_mode_cls_token": _read,
        "pooling_mode_max_tokens": _read,
        "pooling_mode_mean_tokens": _read,
        "pooling_mode_mean_sqrt_len_tokens": _read,
        "pooling_mode_weightedmean_tokens": _read,
        "pooling_mode_lasttoken": _read,
        "include_prompt": _flag,
    },
    "Dense": {
        "in_features": _read,
        "out_features": _read,
        "bias": _read,
        "activation_function": _torch_class,
        "module_input_name": _read,
        "module_output_name": _read,
        "use_residual": _read,
        "init_weight": _null,
        "init_bias": _null,
    },
    "Normalize": {"module_input_name": _read, "module_output_name": _read},
    "Dropout": {"dropout": _read},
}
"""Keys in the configuration of each module after the encoder."""

ENTRY_KEYS: Mapping[str, Rule] = {
    "idx": _read,
    "name": _read,
    "path": _read,
    "type": _read,
    "kwargs": _one_of([], {}),
}
"""Keys of an entry in `modules.json`."""

_EVERY_MODEL: Mapping[str, Rule] = {
    "__version__": _read,
    "requirements": _read,
    "prompts": _read,
    "default_prompt_name": _read,
}
MODEL_KEYS: Mapping[Task, Mapping[str, Rule]] = {
    "feature-extraction": {
        **_EVERY_MODEL,
        "model_type": _one_of("SentenceTransformer"),
        "truncate_dim": _read,
        "similarity_fn_name": _one_of("cosine", "dot"),
    },
    "sequence-classification": {
        **_EVERY_MODEL,
        "model_type": _one_of("CrossEncoder", "SentenceTransformer"),
        "activation_fn": _read,
        "keep_in_fp32_modules": _read,
    },
}
"""Keys in `config_sentence_transformers.json`."""

# Keys of a cross-encoder in `config.json`, before sentence-transformers 6.
_CROSS_ENCODER: Mapping[str, Rule] = {"version": _read, "activation_fn": _read}

# Names of the encoder's output and of the module's output, by task.
_OUTPUTS: Mapping[Task, tuple[str, str]] = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
# Arguments that affect only speed, memory and rounding, or that sentence-transformers ignores.
_RUNTIME = ("attn_implementation", "device_map", "dtype", "torch_dtype", "trust_remote_code", "use_cache")
_PROCESSING: Mapping[str, Mapping[str, object]] = {
    "common": {"return_tensors": "pt"},
    "text": {"padding": True, "truncation": "longest_first"},
}
_OTHER_INPUTS = {"audio", "image", "video"}

_REMEDY = "remove it in a copy of the checkpoint to export the model without it, which may change the results"
_REMEDIES = {
    "modality_config.message": "it inserts texts into the tokenizer's chat template, which only embedding "
    "models support; remove it in a copy of the checkpoint to use bare texts, which changes the results",
    "similarity_fn_name": "add --similarity cosine to compare the embeddings by cosine nevertheless",
}


def check_settings(
    directory: Path,
    task: Task | None,
    *,
    skipped: Collection[str] = (),
    pooling_is_chosen: bool = False,
    similarity: str | None = None,
) -> None:
    """Reject settings of a checkpoint that bundles do not support.

    Args:
        directory: Checkpoint directory.
        task: Task of the bundle, or None if the head is omitted. Settings of the head are then ignored.
        skipped: Module kinds that the export omits.
        pooling_is_chosen: Whether the export replaces the pooling of the checkpoint.
        similarity: "cosine" to accept a checkpoint with another similarity function.

    Raises:
        SourceError: A file is invalid, or has a key or a value that bundles do not support.
    """
    _check_encoder_class(directory, skipped)
    _check(find_sentence_config(directory), transformer_keys(directory, task))
    if task is None:
        return
    modules = [module for module in read_list(directory) if module.kind not in skipped]
    keys = dict(MODEL_KEYS[task])
    if similarity is not None:
        keys["similarity_fn_name"] = _read
    elif _cuts_unit_vectors(directory, modules):
        keys["similarity_fn_name"] = _one_of("cosine")
    _check(directory / PROMPTS_FILE, keys)
    _check_entries(directory, skipped)
    if task == "sequence-classification":
        _check_object(directory / "config.json", "sentence_transformers", _CROSS_ENCODER)
        return
    for module in modules:
        if module.kind in MODULE_KEYS and not (pooling_is_chosen and module.kind == "Pooling"):
            _check(directory / module.path / "config.json", MODULE_KEYS[module.kind])


def lacks_template_setting(directory: Path) -> bool:
    """Return whether the files do not specify if texts are inserted into the tokenizer's chat template.

    sentence-transformers 6 does so for a checkpoint without `modules.json`, earlier releases do not.
    """
    settings = read_object(directory / "tokenizer_config.json")
    has_template = bool(settings.get("chat_template")) or (directory / "chat_template.jinja").is_file()
    return has_template and not (directory / MODULES_FILE).is_file()


def transformer_keys(directory: Path, task: Task | None) -> Mapping[str, Rule]:
    """Return the keys in `sentence_bert_config.json`, the settings of the Transformer module.

    Args:
        directory: Checkpoint directory. Arguments that repeat settings of its files are supported.
        task: See `check_settings`.
    """
    processor = read_object(directory / "tokenizer_config.json") | {"use_fast": True}
    limit = read_sentence_config(directory).get("max_seq_length")
    if limit is not None:
        processor["model_max_length"] = limit
    model_kwargs = _repeats({}, (*_RUNTIME, "add_pooling_layer", "low_cpu_mem_usage", "use_safetensors"))
    processor_kwargs = _repeats(processor, ("trust_remote_code",))
    config_kwargs = _repeats(read_object(directory / "config.json"), _RUNTIME)
    output, feature = _OUTPUTS[task] if task else (None, None)
    return {
        "max_seq_length": _limit,
        "do_lower_case": _one_of(*_FLAGS),
        "unpad_inputs": _read,
        "backend": _read,
        "transformer_task": _one_of(task) if task else _read,
        "module_output_name": _one_of(feature) if feature else _read,
        "modality_config": _modalities(output),
        "processing_kwargs": _processing,
        "model_kwargs": model_kwargs,
        "model_args": model_kwargs,
        "processor_kwargs": processor_kwargs,
        "tokenizer_args": processor_kwargs,
        "config_kwargs": config_kwargs,
        "config_args": config_kwargs,
        "query_length": _null if task else _read,
        "document_length": _null if task else _read,
        "query_expansion": _null if task else _read,
        "tokenizer_name_or_path": _null,
        "model_name_or_path": _null,
        "cache_dir": _null,
    }


def _modalities(output: str | None) -> Rule:
    """Accept other kinds of input than text, and texts whose output is `output` (any output if None)."""
    text = _repeats({"method": "forward", "method_output_name": output}, ("format",)) if output else _read
    # `render_template` reads it.
    names = ("text", "message") if output == _OUTPUTS["feature-extraction"][0] else ("text",)

    def rule(path: str, value: object) -> Iterator[tuple[str, object]]:
        if not isinstance(value, dict):
            yield from _null(path, value)
            return
        for name, entry in value.items():
            if name in names:
                yield from text(f"{path}.{name}", entry)
            elif not _OTHER_INPUTS.issuperset(set(name.split("+")) - {"text"}):
                yield f"{path}.{name}", entry

    return rule


def _processing(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Accept the arguments with which sentence-transformers calls the tokenizer anyway."""
    if not isinstance(value, dict):
        yield from _null(path, value)
        return
    for name, arguments in value.items():
        if name not in _OTHER_INPUTS:
            yield from _repeats(_PROCESSING.get(name, {}))(f"{path}.{name}", arguments)


def _cuts_unit_vectors(directory: Path, modules: Sequence[Module]) -> bool:
    """Return whether embeddings are cut after they are scaled to length 1, and are then shorter."""
    kinds = [module.kind for module in modules if module.kind != "Dropout"]
    is_truncated = read_object(directory / PROMPTS_FILE).get("truncate_dim") is not None
    return kinds[-1:] == ["Normalize"] and is_truncated


def _check_encoder_class(directory: Path, skipped: Collection[str]) -> None:
    first = next(iter(read_list(directory)), None)
    if first is not None and "." in first.kind and first.kind not in skipped:
        raise SourceError(
            f"{directory / MODULES_FILE} loads the encoder with {first.kind}, which needs the publisher's "
            f"own code, which is never executed: add --skip-module {first.kind} to export the encoder "
            "without it, which may change the results"
        )


def _check_entries(directory: Path, skipped: Collection[str]) -> None:
    modules = read_list(directory)
    for module, entry in zip(modules, read_json(directory / MODULES_FILE) if modules else (), strict=True):
        if module.kind not in skipped:
            _reject(directory / MODULES_FILE, _unsupported(entry, ENTRY_KEYS))


def _check(path: Path | None, keys: Mapping[str, Rule]) -> None:
    if path is not None:
        _reject(path, _unsupported(read_object(path), keys))


def _check_object(path: Path, key: str, keys: Mapping[str, Rule]) -> None:
    """Check the object at `key` of a JSON file."""
    content = read_object(path).get(key)
    unsupported = _unsupported(content, keys) if isinstance(content, dict) else _null("", content)
    _reject(path, ((f"{key}.{name}".rstrip("."), value) for name, value in unsupported))


def _unsupported(content: Mapping[str, object], keys: Mapping[str, Rule]) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        yield from keys.get(key, _null)(key, value)


def _reject(path: Path, unsupported: Iterator[tuple[str, object]]) -> None:
    """Raise an error that names all unsupported settings of a file, if there are any."""
    found = list(unsupported)
    if not found:
        return
    first = found[0][0]
    settings = ", ".join(f"{name} = {reprlib.repr(value)}" for name, value in found)
    raise SourceError(
        f"{path} sets {settings}, which bundles do not support: {_REMEDIES.get(first, _REMEDY)}"
    )
