"""Reads a checkpoint's tokenizer with transformers and writes the files of a bundle.

The ids are those of `AutoTokenizer`. If `tokenizer.json` alone gives other ids, because transformers applies
settings of other files or rebuilds the tokenizer of a known class, the caller has to choose.
"""

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, normalizers

from attnlens_publisher.errors import RefusedError
from attnlens_publisher.process import Report

Choice = Literal["published", "transformers"]
Ids = list[int]
Input = str | tuple[str, str]

# Texts on which readers of the same files could differ. Each added and special token is probed, too.
TEXTS: tuple[Input, ...] = (
    "",
    "the cat sat on the mat.",
    " The Cat  sat ",
    "NASA's HTML2text isn't 3.14, x=y_z@example.org #1",
    "line\n\nbreak\r\nand\ta tab ",
    "Crème brûlée, Cre\u0300me bru\u0302le\u0301e, Straße, İstanbul, \ufb01ne",
    "東京と京都。日本語テキスト 中文 한국어 \u304b\u3099 \uff26\uff55\uff4c\uff4c",
    "Привет, мир! Καλημέρα. שלום עולם مرحبا नमस्ते สวัสดี",
    "😀 🎉👍🏽 ❤️ 👩‍💻 🇳🇴!",
    "a\u200bb c\u00add e\u00a0f ① ½ ™ … “quoted” \u2013 dash",
    ("a query", "and a document"),
    ("", "b"),
)
_MAX_SHOWN = 2
GENERIC_CLASS = "PreTrainedTokenizerFast"
"""A class with which transformers uses `tokenizer.json` as it is."""
CHOICE_KEY = "attnlens_tokenizer"
"""Key in a bundle's `tokenizer_config.json` for the choice, if `tokenizer.json` and transformers differ."""
# Settings that are part of the written tokenizer.json, or that must not apply to it.
_DROPPED = (
    CHOICE_KEY,
    "added_tokens_decoder",
    "additional_special_tokens",
    "auto_map",
    "extra_special_tokens",
    "fast_tokenizer_files",
    "max_length",  # fastembed would truncate to it
    "model_specific_special_tokens",
    "split_special_tokens",
)


def read(
    _report: Report,
    *,
    source: str,
    output: str,
    choice: Choice | None,
    max_tokens: int,
    pad_token_id: int,
    lowercase: bool,
) -> str:
    """Write `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` of a bundle.

    Args:
        source: Checkpoint directory with tokenizer files and `config.json`.
        output: Directory for the files.
        choice: Which ids to use if `tokenizer.json` alone and `AutoTokenizer` differ.
        max_tokens: Length at which texts are truncated.
        pad_token_id: Padding token if the checkpoint does not specify one.
        lowercase: Whether texts are lowercased first, a setting of sentence-transformers.

    Returns:
        A description of the tokenizer and its origin.

    Raises:
        RefusedError: No `tokenizer.json` can express the tokenizer, or its files differ and there is no
            choice.
    """
    directory, target = Path(source), Path(output)
    settings = _object(directory / "tokenizer_config.json")
    loaded, backend, origin, differs = _open(directory, settings, choice)
    side = loaded.truncation_side
    if loaded.pad_token is None:
        loaded.pad_token = mark_padding(backend, pad_token_id)
    if lowercase:
        add_lowercase(backend)
    backend.no_padding()
    backend.no_truncation()
    has_types = any(backend.encode("a").type_ids + backend.encode("a", "b").type_ids)
    backend.enable_truncation(max_tokens, direction=side)
    content = json.loads(backend.to_str())
    if has_types and "token_type_ids" not in loaded.model_input_names:
        content["post_processor"] = _without_types(content["post_processor"])
    _write(target / "tokenizer.json", content)
    _write(target / "special_tokens_map.json", _special_tokens(loaded, backend))
    names = (GENERIC_CLASS,) if choice == "published" else (type(loaded).__name__, GENERIC_CLASS)
    for name in names:
        content = _settings(settings, loaded, name, max_tokens)
        _write(target / "tokenizer_config.json", content | ({CHOICE_KEY: choice} if differs else {}))
        if _reads_equally(directory, target):
            return origin
    raise RefusedError(
        "transformers reads the written tokenizer.json in another way, because of the tokenizer class that "
        "it uses for this model_type: omit --tokenizer, or specify --tokenizer transformers"
    )


def _open(
    directory: Path, settings: dict[str, Any], choice: Choice | None
) -> tuple[Any, Tokenizer, str, bool]:
    """Return the tokenizer of transformers, the backend to save, and a description of its origin.

    The last value is whether `tokenizer.json` and transformers give different ids.

    Raises:
        RefusedError: See `read`.
    """
    published = _read_published(directory)
    if choice != "published":
        loaded = _load(directory, settings, has_json=published is not None)
        relation, differs = _compare(directory, settings, loaded, published, choice)
        return loaded, loaded.backend_tokenizer, _name(loaded) + relation, differs
    if published is None:
        raise RefusedError("the checkpoint has no tokenizer.json: omit --tokenizer published")
    side = (published.truncation or {}).get("direction", "right")
    origin = f"tokenizer.json of the checkpoint as requested, not {_name(None)}"
    generic, differs = _load_published(directory, published, side)
    return generic, published, origin, differs


def _read_published(directory: Path) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise RefusedError(f"tokenizer.json is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    return tokenizer


def _load(directory: Path, settings: dict[str, Any], *, has_json: bool) -> Any:  # noqa: ANN401 - any class
    """Return the tokenizer that `AutoTokenizer` reads.

    Raises:
        RefusedError: No `tokenizer.json` can express it.
    """
    import transformers  # noqa: PLC0415 - the process has imported it

    remedy = "pass a tokenizer.json that gives its ids with --tokenizer FILE"
    if has_json:
        remedy += ", or use that of the checkpoint, whose ids may differ, with --tokenizer published"
    for key, reason in {
        "auto_map": "needs the publisher's code",
        "split_special_tokens": "splits special tokens in texts, which tokenizer.json cannot express",
    }.items():
        if settings.get(key):
            raise RefusedError(f"{key} in tokenizer_config.json {reason}: {remedy}")
    if not has_json and any(directory.glob("*.model")):
        importlib.import_module("sentencepiece")  # if it is missing, transformers reports another library
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        if loaded.is_fast:
            loaded.backend_tokenizer.to_str()
    except Exception as error:
        reason = " ".join(str(error).replace(str(directory), "the checkpoint").split())
        raise RefusedError(
            "transformers cannot read the tokenizer of the checkpoint, or no tokenizer.json can express it "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from error
    if not loaded.is_fast:
        raise RefusedError(f"{type(loaded).__name__} of transformers has no fast tokenizer: {remedy}")
    if not has_json:
        _check_vocabulary(directory, loaded, remedy)
    loaded.backend_tokenizer.no_padding()
    return loaded


def _load_published(directory: Path, published: Tokenizer, side: str) -> tuple[Any, bool]:
    """Return a generic tokenizer with the named tokens and settings of `AutoTokenizer`, if it reads any.

    The second value is whether its ids are others, or it cannot read the files.
    """
    import transformers  # noqa: PLC0415 - the process has imported it

    stated: dict[str, Any] = {"truncation_side": side}
    differs = True
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - the file is used nevertheless, as requested
        loaded = None
    if loaded is not None:
        known = {token.content for token in published.get_added_tokens_decoder().values()}
        stated = {"truncation_side": loaded.truncation_side, "model_input_names": loaded.model_input_names}
        stated |= {name: token for name, token in loaded.special_tokens_map.items() if token in known}
        differs = not loaded.is_fast or any(
            ours != theirs for _, ours, theirs in _encodings(published, loaded.backend_tokenizer)
        )
    generic: Any = transformers.PreTrainedTokenizerFast
    return generic(tokenizer_object=published, **stated), differs


def _check_vocabulary(directory: Path, loaded: Any, remedy: str) -> None:  # noqa: ANN401 - see `_load`
    """Reject a tokenizer that has read no vocabulary, for which transformers gives no error."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("config.json", "tokenizer_config.json"):
            if (directory / name).exists():
                shutil.copyfile(directory / name, Path(empty) / name)
        import transformers  # noqa: PLC0415 - the process has imported it

        try:
            without = transformers.AutoTokenizer.from_pretrained(empty, trust_remote_code=False)
        except Exception:  # noqa: BLE001 - a class that needs a vocabulary has read one
            return
    if without.get_vocab() == loaded.get_vocab():
        names = " or ".join(sorted(loaded.vocab_files_names.values()))
        raise RefusedError(
            f"{type(loaded).__name__} of transformers reads {names}, and the checkpoint has none: rename the "
            f"vocabulary, correct tokenizer_class in tokenizer_config.json, or {remedy}"
        )


def _check_end_token(loaded: Any) -> None:  # noqa: ANN401 - see `_load`
    """Reject a `tokenizer.json` without the end token that `tokenizer_config.json` requests.

    transformers 5 adds none in this case, but older versions do, for some classes.
    """
    ids = loaded.backend_tokenizer.encode("a").ids
    if loaded.eos_token and ids[-1:] != [loaded.eos_token_id]:
        raise RefusedError(
            "tokenizer_config.json sets add_eos_token, but tokenizer.json does not append "
            f"{loaded.eos_token}, and versions of transformers disagree on which one applies: set "
            "add_eos_token to false for texts without this token, or pass a tokenizer.json whose "
            "post-processor appends it with --tokenizer FILE"
        )


def _compare(
    directory: Path,
    settings: dict[str, Any],
    loaded: Any,  # noqa: ANN401 - see `_load`
    published: Tokenizer | None,
    choice: Choice | None,
) -> tuple[str, bool]:
    """Return how a tokenizer relates to the files of the checkpoint, and whether it differs from them.

    Raises:
        RefusedError: It differs from `tokenizer.json`, and there is no choice.
    """
    if published is None:
        names = {*loaded.vocab_files_names.values()} - {"tokenizer.json"}
        found = sorted(name for name in names if (directory / name).exists())
        return f", built from {' and '.join(found) or 'the vocabulary'}", False
    if settings.get("add_eos_token") is True and choice is None:
        _check_end_token(loaded)
    different = [
        (text, ours, theirs)
        for text, ours, theirs in _encodings(published, loaded.backend_tokenizer)
        if ours != theirs
    ]
    if not different:
        return ", equal to tokenizer.json", False
    if choice == "transformers":
        return " as requested, not tokenizer.json of the checkpoint", True
    different.sort(key=lambda entry: len(entry[1][0]) + len(entry[2][0]))
    shown = "; ".join(
        f"{text!r} has {_spell(ours)} in tokenizer.json and {_spell(theirs)} in transformers"
        for text, ours, theirs in different[:_MAX_SHOWN]
    )
    raise RefusedError(
        f"tokenizer.json and {_name(loaded)}, which applies tokenizer_config.json and other files, give "
        f"different token ids for {len(different)} texts: {shown}: choose with --tokenizer transformers, "
        "as sentence-transformers does, or --tokenizer published"
    )


def _spell(encoded: tuple[Ids, Ids]) -> str:
    ids, types = encoded
    return f"{ids} with types {types}" if any(types) else str(ids)


def _encodings(
    first: Tokenizer, second: Tokenizer
) -> Iterator[tuple[Input, tuple[Ids, Ids], tuple[Ids, Ids]]]:
    """Yield each probe with its ids and types in both tokenizers, which then do not truncate."""
    tokens = {
        token.content: None
        for tokenizer in (first, second)
        for token in tokenizer.get_added_tokens_decoder().values()
    }
    probes = [*TEXTS, *(f"a {token} b{token}c" for token in tokens)]
    for tokenizer in (first, second):
        tokenizer.no_truncation()
    encoded = [
        [(encoding.ids, encoding.type_ids) for encoding in tokenizer.encode_batch(probes)]
        for tokenizer in (first, second)
    ]
    yield from zip(probes, *encoded, strict=True)


def _reads_equally(directory: Path, target: Path) -> bool:
    """Return whether `AutoTokenizer` gives the ids of the `tokenizer.json` that was written to `target`."""
    import transformers  # noqa: PLC0415 - the process has imported it

    config = _object(directory / "config.json")
    path = target / "config.json"  # overwritten later
    _write(path, config["text_config"] if isinstance(config.get("text_config"), dict) else config)
    written = Tokenizer.from_file(str(target / "tokenizer.json"))
    side = (written.truncation or {})["direction"]
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    finally:
        path.unlink()
    return bool(loaded.truncation_side == side) and all(
        ours == theirs for _, ours, theirs in _encodings(written, loaded.backend_tokenizer)
    )


def mark_padding(backend: Tokenizer, pad_token_id: int) -> str | None:
    """Mark a padding token, which some tools require, as special, as transformers would when it loads it."""
    token = backend.id_to_token(pad_token_id) or backend.id_to_token(0)
    if token is not None:
        backend.add_special_tokens([token])
    return token


def add_lowercase(backend: Tokenizer) -> None:
    """Lowercase first, as `do_lower_case` in `sentence_bert_config.json` does in sentence-transformers."""
    normalizer: Any = backend.normalizer
    is_sequence = isinstance(normalizer, normalizers.Sequence)
    steps = [*normalizer] if is_sequence else [normalizer]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        steps = [normalizers.Lowercase(), *(step for step in steps if step is not None)]
        backend.normalizer = normalizers.Sequence(steps)


def _without_types(processor: dict[str, Any] | None) -> dict[str, Any]:
    """Return a post-processor, in JSON, with token types of 0: those of a model that is given none."""
    steps = [processor] if processor else []
    if processor and processor["type"] == "Sequence":
        steps = processor["processors"]
    steps = [_template_of(step) if step["type"] == "BertProcessing" else step for step in steps]
    if not any(step["type"] in ("TemplateProcessing", "RobertaProcessing") for step in steps):
        steps.append(_template([], [], []))
    for step in steps:
        for piece in (*step.get("single", ()), *step.get("pair", ())):
            for described in piece.values():
                described["type_id"] = 0
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}


def _template_of(bert: dict[str, Any]) -> dict[str, Any]:
    return _template([bert["cls"]], [bert["sep"]], [bert["sep"]])


def _template(before: list[Any], between: list[Any], after: list[Any]) -> dict[str, Any]:
    """Return a TemplateProcessing, in JSON, of (token, id) around the texts."""

    def special(tokens: list[Any]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in tokens]

    first, second = ([{"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    single = [*special(before), *first, *special(after)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*special(before), *first, *special(between), *second, *special(after)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]} for token, number in [*before, *after]
        },
    }


def _special_tokens(loaded: Any, backend: Tokenizer) -> dict[str, Any]:  # noqa: ANN401 - see `_load`
    """Return the special tokens by name, with their flags if these are not the defaults of fastembed."""
    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}

    def described(token: str) -> str | dict[str, Any]:
        added = flags.get(token, AddedToken(token, special=True))
        stated = {name: getattr(added, name) for name in ("lstrip", "normalized", "rstrip", "single_word")}
        return {"content": token} | stated if any(stated.values()) else token

    return {name: described(token) for name, token in loaded.special_tokens_map.items()}


def _settings(settings: dict[str, Any], loaded: Any, name: str, max_tokens: int) -> dict[str, Any]:  # noqa: ANN401
    """Return the content of `tokenizer_config.json`."""
    kept = {key: value for key, value in settings.items() if key not in _DROPPED}
    if name == GENERIC_CLASS:
        kept.pop("add_prefix_space", None)  # transformers 4 would apply it
        kept = {key: value for key, value in kept.items() if not key.endswith("_token")}
    extra = loaded.extra_special_tokens
    return (
        kept
        | ({"additional_special_tokens": [str(token) for token in extra]} if extra else {})
        | {key: token for key, token in loaded.special_tokens_map.items() if _spelled(kept.get(key)) != token}
        | {
            "tokenizer_class": GENERIC_CLASS if name == "TokenizersBackend" else name,
            "model_max_length": max_tokens,
            "model_input_names": list(loaded.model_input_names),
            "truncation_side": loaded.truncation_side,
        }
    )


def _name(loaded: Any) -> str:  # noqa: ANN401 - see `_load`
    import transformers  # noqa: PLC0415 - the process has imported it

    class_name = "AutoTokenizer" if loaded is None else type(loaded).__name__
    return f"{class_name} of transformers {transformers.__version__}"


def _spelled(token: object) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(content, dict):
        raise RefusedError(f"{path.name} contains a {type(content).__name__} instead of an object")
    return content


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
