"""Builds a `tokenizer.json` from the vocabulary files of a checkpoint that was published without one.

The recipe depends on the tokenizer class in `tokenizer_config.json` or, if it is missing, on the
`model_type`. Unknown classes and settings are rejected. The recipes follow convert_slow_tokenizer.py in
transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_json, read_object
from attnlens_export.tokenizer.recipes import RECIPES, Recipe, class_of_model_type
from attnlens_export.tokenizer.sentencepiece import build_unigram

_REMEDY = (
    "create a tokenizer.json with the library of the model (transformers: "
    "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(OTHER)), and pass it with --tokenizer FILE"
)


@dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer built from a checkpoint's vocabulary files.

    Attributes:
        tokenizer: Tokenizer that adds special tokens, without truncation or padding.
        special_tokens: Special tokens by name, such as {"cls_token": "[CLS]"}.
        description: Human-readable summary of the tokenizer and its source files.
    """

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    description: str


def build_tokenizer(source: Path) -> BuiltTokenizer | None:
    """Build a checkpoint's tokenizer. Return None if the checkpoint has no tokenizer files.

    Args:
        source: Checkpoint directory, with `config.json`.

    Raises:
        SourceError: The files are invalid or do not identify a supported tokenizer.
    """
    names = {name for each in RECIPES.values() for name in each.files}
    present = sorted(name for name in names if (source / name).is_file())
    if not present:
        return None
    settings = read_object(source / "tokenizer_config.json")
    recipe = _recipe(source, settings, present)
    special = _special_tokens(source, settings, recipe)
    spelled = {name: str(token["content"]) for name, token in special.items()}
    tokenizer, description = _BUILDERS[recipe.kind](source, recipe, settings, spelled)
    _add_tokens(tokenizer, _added_tokens(source, settings), special, recipe.appended, source)
    _add_extra_tokens(tokenizer, _extra_special_tokens(source, settings), spelled, source)
    absent = [name for name, token in spelled.items() if tokenizer.token_to_id(token) is None]
    missing = [spelled.pop(name) for name in absent if name in recipe.needed]
    if missing:
        raise SourceError(f"the vocabulary in {source} lacks {', '.join(missing)}: {_REMEDY}")
    spelled = {name: token for name, token in spelled.items() if name not in absent}
    tokenizer.post_processor = _post_processor(tokenizer, recipe, spelled)
    template = recipe.single.format(**spelled)
    return BuiltTokenizer(tokenizer, spelled, f"{description}; {template}")


def tokenizer_class(source: Path, settings: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint's tokenizer class in transformers, without its suffix "Fast".

    Args:
        source: Checkpoint directory, with `config.json`.
        settings: Content of `tokenizer_config.json`.
    """
    config = read_object(source / "config.json")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return str(named or class_of_model_type(str(config.get("model_type")))).removesuffix("Fast")


def _recipe(source: Path, settings: dict[str, Any], present: list[str]) -> Recipe:
    name = tokenizer_class(source, settings)
    recipe = RECIPES.get(name)
    if recipe is None:
        raise SourceError(
            f"{source} has no tokenizer.json, and none can be built from {', '.join(present)} for the "
            f"tokenizer class {name!r} (known: {', '.join(RECIPES)}): {_REMEDY}"
        )
    found = [each for each in recipe.files if each in present]
    if not found or (recipe.needs_all_files and len(found) < len(recipe.files)):
        raise SourceError(
            f"{source} has {', '.join(present)}, but a {name} is built from {recipe.wanted}: {_REMEDY}"
        )
    for key, supported in recipe.fixed_settings.items():
        if settings.get(key) not in (None, supported):
            raise SourceError(f"{key}={settings[key]!r} in {source} is not supported: {_REMEDY}")
    return recipe


def _special_tokens(source: Path, settings: dict[str, Any], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the special tokens and their flags. Tokens that are not published use the class defaults."""
    stated = settings | read_object(source / "special_tokens_map.json")
    tokens = {}
    for name, usual in recipe.special_tokens.items():
        token = stated.get(name) or usual
        is_mask = name == "mask_token" and recipe.mask_takes_space
        default = {"lstrip": is_mask, "special": True, "normalized": False}
        tokens[name] = default | (token if isinstance(token, dict) else {"content": str(token)})
    return tokens


def _extra_special_tokens(source: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return additional special tokens, which the class does not define, with their flags.

    Files and keys have the same precedence as in transformers (`from_pretrained` in
    tokenization_utils_base.py): `extra_special_tokens` is the newer name, and special_tokens_map.json is
    ignored if there is `added_tokens_decoder`.

    Raises:
        SourceError: The value is neither a list nor an object of tokens.
    """
    extra, additional = "extra_special_tokens", "additional_special_tokens"
    tokens = _tokens(source, settings.get(extra) or settings.get(additional) or [])
    if "added_tokens_decoder" not in settings:
        stated = read_object(source / "special_tokens_map.json")
        tokens += _tokens(source, stated.get(extra) or [])
        tokens = tokens or _tokens(source, stated.get(additional) or [])
    return tokens


def _tokens(source: Path, stated: object) -> list[dict[str, Any]]:
    entries = list(stated.values()) if isinstance(stated, dict) else stated
    if not isinstance(entries, list):
        raise SourceError(f"the additional special tokens in {source} are {stated!r}, not a list: {_REMEDY}")
    tokens = [each if isinstance(each, dict) else {"content": each} for each in entries]
    bad = [each for each in tokens if not isinstance(each.get("content"), str)]
    if bad:
        raise SourceError(f"the additional special token {bad[0]} in {source} has no content: {_REMEDY}")
    return [{"special": True} | each for each in tokens]


def _build_wordpiece(
    source: Path, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]
) -> tuple[Tokenizer, str]:
    path = source / recipe.files[0]
    lines = _read_text(path).split("\n")
    vocabulary = {token: number for number, token in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    lowercase, reason = _lowercases(settings, vocabulary)
    tokenizer = Tokenizer(_model(path, lambda: models.WordPiece(vocabulary, unk_token=special["unk_token"])))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, f"WordPiece from {path.name}, {reason}"


def _lowercases(settings: dict[str, Any], vocabulary: dict[str, int]) -> tuple[bool, str]:
    stated = settings.get("do_lower_case")
    if stated is not None:
        return bool(stated), "lower-casing" if stated else "cased"
    # The default differs between transformers 4 and 5. A lower-casing model has no use for uppercase tokens,
    # so their presence or absence in the vocabulary is decisive.
    markers = ("[", "<")
    is_cased = any(token != token.lower() for token in vocabulary if not token.startswith(markers))
    return not is_cased, f"{'cased' if is_cased else 'lower-casing'} according to its vocabulary"


def _build_byte_level(
    source: Path, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]
) -> tuple[Tokenizer, str]:
    vocabulary_path, merges_path = (source / name for name in recipe.files)
    vocabulary = read_json(vocabulary_path)
    merges = [
        tuple(line.split(" "))
        for line in _read_text(merges_path).splitlines()
        if not line.startswith("#version")
    ]
    pairs: Any = [pair for pair in merges if pair != ("",)]
    unknown = special["unk_token"] if recipe.has_unknown else None
    model = _model(merges_path, lambda: models.BPE(vocabulary, pairs, unk_token=unknown))
    add_prefix_space = bool(settings.get("add_prefix_space", False))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    prefix = ", with a space before the text" if add_prefix_space else ""
    return tokenizer, f"byte-level BPE from {vocabulary_path.name} and {merges_path.name}{prefix}"


def _build_sentencepiece(
    source: Path, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]
) -> tuple[Tokenizer, str]:
    path = next(source / name for name in recipe.files if (source / name).is_file())
    return build_unigram(path, recipe, settings, special), f"Unigram from {path.name}"


_BUILDERS: dict[str, Callable[[Path, Recipe, dict[str, Any], dict[str, str]], tuple[Tokenizer, str]]] = {
    "wordpiece": _build_wordpiece,
    "byte_level": _build_byte_level,
    "unigram": _build_sentencepiece,
}


def _added_tokens(source: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return tokens added after training and their flags, keyed and sorted by id."""
    stated = read_object(source / "added_tokens.json")
    added = {int(number): {"content": token} for token, number in stated.items()}
    added |= {
        int(number): dict(token) for number, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    return dict(sorted(added.items()))


def _add_tokens(
    tokenizer: Tokenizer,
    added: dict[int, dict[str, Any]],
    special: dict[str, dict[str, Any]],
    appended: tuple[str, ...],
    source: Path,
) -> None:
    """Add tokens that were added after training, and mark special tokens.

    Raises:
        SourceError: An added token would get a different id, because the library continues after the
            vocabulary.
    """
    for number, token in added.items():
        text = str(token["content"])
        tokenizer.add_tokens([_added_token(token)])
        if tokenizer.token_to_id(text) != number:
            raise SourceError(
                f"the added token {text!r} of {source} has the id {number}, but with this vocabulary it "
                f"would be {tokenizer.token_to_id(text)}: {_REMEDY}"
            )
    for name, token in special.items():
        if name in appended or tokenizer.token_to_id(str(token["content"])) is not None:
            tokenizer.add_tokens([_added_token(token)])


def _add_extra_tokens(
    tokenizer: Tokenizer, extra: list[dict[str, Any]], special: dict[str, str], source: Path
) -> None:
    """Mark additional tokens as special, and append those that are missing from the vocabulary.

    Raises:
        SourceError: Other tokens are missing too, so the order of the new ids is ambiguous.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    lacking = [token["content"] for token in extra if tokenizer.token_to_id(token["content"]) is None]
    absent = [token for token in special.values() if tokenizer.token_to_id(token) is None]
    if lacking and absent:
        raise SourceError(
            f"the vocabulary in {source} lacks {', '.join(absent)} as well as {', '.join(lacking)}, so their "
            f"ids are ambiguous: {_REMEDY}"
        )
    tokenizer.add_tokens([_added_token(token) for token in extra if token["content"] not in added])


def _added_token(token: dict[str, Any]) -> AddedToken:
    flags = {key: value for key, value in token.items() if key not in ("content", "__type")}
    return AddedToken(str(token["content"]), **({"normalized": False} | flags))


def _post_processor(
    tokenizer: Tokenizer, recipe: Recipe, special: dict[str, str]
) -> processors.RobertaProcessing | processors.TemplateProcessing:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)

    def with_id(name: str) -> tuple[str, int]:
        return special[name], vocabulary[special[name]]

    if recipe.trims_offsets:
        is_prefixed = getattr(tokenizer.pre_tokenizer, "add_prefix_space", False)
        return processors.RobertaProcessing(
            with_id("sep_token"), with_id("cls_token"), trim_offsets=True, add_prefix_space=is_prefixed
        )
    names = [name for name in special if f"{{{name}}}" in recipe.single]
    return processors.TemplateProcessing(
        single=recipe.single.replace("text", "$A").format(**special),
        pair=recipe.pair.format(**special),
        special_tokens=[with_id(name) for name in names],
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not readable as UTF-8: {error}") from error


def _model(path: Path, make: Callable[[], models.Model]) -> models.Model:
    try:
        return make()
    except Exception as error:  # the library raises plain Exception
        raise SourceError(f"{path} contains no vocabulary: {error}") from error
