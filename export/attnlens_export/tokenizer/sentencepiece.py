"""Converts SentencePiece Unigram models, and compares the result with the sentencepiece library."""

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from attnlens.sentencepiece.v1.model_pb2 import Model
from attnlens_export.errors import SourceError
from attnlens_export.tokenizer.recipes import Recipe
from attnlens_model.checkpoint.tensor_files import check_not_lfs_pointer

_UNIGRAM = 1
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"
_NUM_EXTRA_IDS = 100  # T5's sentinels, unless tokenizer_config.json specifies another number

# Texts on which implementations could differ: composed and decomposed accents, ligatures, full-width
# characters, whitespace, scripts without spaces, emoji sequences, symbols and numbers.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces, a tab\tand a line\n\nbreak ",
    "Crème brûlée, Cre\u0300me bru\u0302le\u0301e, Straße, İstanbul, ÀÉÎÕÜ",
    "ﬁne ﬂow, \uff26\uff55\uff4c\uff4c\u3000\uff57, ① ½ ™ … “quoted” \u2013 dash",
    "東京と京都。日本語テキスト 中文 한국어",
    "Привет, мир! Καλημέρα. שלום. नमस्ते สวัสดี",
    "😀 🎉👍🏽 ❤️ 👩‍💻 🇳🇴!",
    "a\u200bb c\u00add e\u00a0f 3.14 20000 x=y_z@example.org #1",
    "",
    "   ",
)

Vocabulary = list[tuple[str, float]]


def build_unigram(path: Path, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]) -> Tokenizer:
    """Build a tokenizer that adds no special tokens.

    Raises:
        SourceError: The file is not a Unigram model, has a different layout, or its tokenizer differs from
            the sentencepiece library.
    """
    check_not_lfs_pointer(path)
    model = _read_model(path)
    unknown = next((row for row, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), None)
    if unknown is None:
        raise SourceError(f"{path} has no piece of type unknown: pass a tokenizer.json with --tokenizer")
    vocabulary = _lay_out(path, model, recipe, settings, special)
    unknown_id = [token for token, _ in vocabulary].index(special["unk_token"])
    byte_fallback = model.trainer.byte_fallback
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown_id, byte_fallback=byte_fallback))
    before = _family_normalizers(recipe, settings)
    tokenizer.normalizer = normalizers.Sequence([*before, *_normalizers(model)])
    scheme: Any = "always" if model.normalizer.add_dummy_prefix else "never"
    # Splitting at spaces first is faster, and equivalent unless a piece contains an inner space.
    is_split = not any(_SPACE in piece.piece[1:] for piece in model.pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=is_split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=is_split)
    _add_tokens(tokenizer, model, vocabulary)
    _compare(path, tokenizer, normalizers.Sequence(before), unknown, unknown_id)
    return tokenizer


def _read_model(path: Path) -> Model:
    try:
        model = Model.FromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise SourceError(f"{path} is not a SentencePiece model: {error}") from error
    kind = model.trainer.model_type
    if kind != _UNIGRAM:
        name = {2: "BPE", 3: "word", 4: "char"}.get(kind, kind)
        raise SourceError(
            f"{path} is a SentencePiece model of type {name}, but only Unigram is supported: pass a "
            "tokenizer.json with --tokenizer"
        )
    if model.trainer.treat_whitespace_as_suffix or not model.normalizer.escape_whitespaces:
        raise SourceError(
            f"{path} does not prepend {_SPACE} to words: pass a tokenizer.json with --tokenizer"
        )
    return model


def _lay_out(
    path: Path, model: Model, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]
) -> Vocabulary:
    """Return (token, score) by token id. In fairseq and T5 models, ids differ from the SentencePiece file."""
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if recipe.layout in ("fairseq", "camembert"):
        first = [piece for piece, _ in pieces[:3]]
        if first != ["<unk>", "<s>", "</s>"]:
            raise SourceError(
                f"{path} starts with {', '.join(first)}, but the {recipe.layout} layout starts with <unk>, "
                "<s>, </s>: pass a tokenizer.json with --tokenizer"
            )
    pad, unknown, mask = (special.get(f"{name}_token", "") for name in ("pad", "unk", "mask"))
    match recipe.layout:
        case "fairseq":
            head = [special["cls_token"], pad, special["sep_token"], unknown]
            return [(token, 0.0) for token in head] + pieces[3:] + [(mask, 0.0)]
        case "camembert":
            # Ids 0, 2 and 4 are unused: the fairseq dictionary precedes that of SentencePiece.
            head = ["<s>NOTUSED", pad, "</s>NOTUSED", unknown]
            return [*((token, 0.0) for token in head), ("<unk>NOTUSED", -100.0), *pieces[1:], (mask, 0.0)]
        case "t5":
            count = int(settings.get("extra_ids", _NUM_EXTRA_IDS))
            return pieces + [(f"<extra_id_{number}>", 0.0) for number in reversed(range(count))]
        case "albert":
            # Split "1995," before the comma, which the original code does in a second pass.
            return [(piece, score - 100 * _is_number_comma(piece)) for piece, score in pieces]
        case _:
            return pieces


def _is_number_comma(piece: str) -> bool:
    return piece.endswith(",") and piece[-2:-1].isdigit()


def _add_tokens(tokenizer: Tokenizer, model: Model, vocabulary: Vocabulary) -> None:
    """Add control pieces, sentinels and user-defined symbols, so that they are never split in a text."""
    kinds = {piece.piece: piece.type for piece in model.pieces}
    for token, _ in vocabulary:
        is_special = kinds.get(token) == _CONTROL or (token not in kinds and token.startswith("<extra_id_"))
        if is_special or kinds.get(token) == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])


def _family_normalizers(recipe: Recipe, settings: dict[str, Any]) -> list[normalizers.Normalizer]:
    """Return the normalizers that the tokenizer class applies before SentencePiece."""
    is_albert = recipe.layout == "albert"
    steps: list[normalizers.Normalizer] = []
    if is_albert:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.get("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", is_albert):
        steps.append(normalizers.Lowercase())
    return steps


def _normalizers(model: Model) -> list[normalizers.Normalizer]:
    """Return the normalizers of SentencePiece, except the replacement of spaces."""
    steps: list[normalizers.Normalizer] = []
    if "nfkc" in model.normalizer.name:
        # The charsmap composes characters too, but the library does not look up sequences of six bytes or
        # more. Without NFC, decomposed kana and Hangul would remain decomposed.
        steps.append(normalizers.NFC())
    if model.normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.normalizer.precompiled_charsmap))
    if model.normalizer.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _compare(
    path: Path, tokenizer: Tokenizer, before: normalizers.Normalizer, unknown: int, unknown_id: int
) -> None:
    """Compare the tokenizer with the sentencepiece library on `PROBES`.

    Raises:
        SourceError: The token ids differ, or the library cannot read the model.
    """
    import sentencepiece  # noqa: PLC0415 - only needed for checkpoints without tokenizer.json

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path} is not a SentencePiece model: {error}") from error
    for probe in PROBES:
        expected = [
            unknown_id if number == unknown else tokenizer.token_to_id(processor.id_to_piece(number))
            for number in processor.encode(before.normalize_str(probe))
        ]
        ids = tokenizer.encode(probe, add_special_tokens=False).ids
        if ids != expected:
            raise SourceError(
                f"the tokenizer built from {path} encodes {probe!r} as {ids}, but SentencePiece as "
                f"{expected}: pass a tokenizer.json with --tokenizer"
            )
