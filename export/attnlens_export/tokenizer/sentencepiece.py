"""A SentencePiece model -> a Unigram tokenizer that gives the same pieces.

The tokenizer is compared with the sentencepiece library before it is returned.
"""

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
_NUM_EXTRA_IDS = 100  # T5's sentinels, unless tokenizer_config.json says otherwise

# Where the ways of cutting could part: accents in both forms, ligatures, full width, white space of all
# kinds, scripts without spaces, emoji that are sequences, symbols and numbers.
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
    """Build a tokenizer without special tokens around the text.

    Raises:
        SourceError: not a Unigram model, or one of another layout, or the pieces differ from the library's.
    """
    check_not_lfs_pointer(path)
    model = _read_model(path)
    unknown = next((row for row, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), None)
    if unknown is None:
        raise SourceError(f"{path} has no piece for what is unknown: give a tokenizer.json with --tokenizer")
    vocabulary = _lay_out(path, model, recipe, settings, special)
    unknown_id = [token for token, _ in vocabulary].index(special["unk_token"])
    byte_fallback = model.trainer.byte_fallback
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown_id, byte_fallback=byte_fallback))
    before = _family_normalizers(recipe, settings)
    tokenizer.normalizer = normalizers.Sequence([*before, *_normalizers(model)])
    scheme: Any = "always" if model.normalizer.add_dummy_prefix else "never"
    # Cutting at spaces first is faster, and the same unless a piece goes on behind one.
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
            f"{path} is a SentencePiece model of type {name}: only Unigram is built; give a tokenizer.json "
            "with --tokenizer"
        )
    if model.trainer.treat_whitespace_as_suffix or not model.normalizer.escape_whitespaces:
        raise SourceError(
            f"{path} does not put {_SPACE} before words: give a tokenizer.json with --tokenizer"
        )
    return model


def _lay_out(
    path: Path, model: Model, recipe: Recipe, settings: dict[str, Any], special: dict[str, str]
) -> Vocabulary:
    """Return (token, score) by id: fairseq and T5 models have other ids than their SentencePiece file."""
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if recipe.layout in ("fairseq", "camembert"):
        first = [piece for piece, _ in pieces[:3]]
        if first != ["<unk>", "<s>", "</s>"]:
            raise SourceError(
                f"{path} begins with {', '.join(first)}: a {recipe.layout} layout begins with <unk>, <s>, "
                "</s>; give a tokenizer.json with --tokenizer"
            )
    pad, unknown, mask = (special.get(f"{name}_token", "") for name in ("pad", "unk", "mask"))
    match recipe.layout:
        case "fairseq":
            head = [special["cls_token"], pad, special["sep_token"], unknown]
            return [(token, 0.0) for token in head] + pieces[3:] + [(mask, 0.0)]
        case "camembert":
            # Ids 0, 2 and 4 are never used: fairseq's dictionary came before SentencePiece's own.
            head = ["<s>NOTUSED", pad, "</s>NOTUSED", unknown]
            return [*((token, 0.0) for token in head), ("<unk>NOTUSED", -100.0), *pieces[1:], (mask, 0.0)]
        case "t5":
            count = int(settings.get("extra_ids", _NUM_EXTRA_IDS))
            return pieces + [(f"<extra_id_{number}>", 0.0) for number in reversed(range(count))]
        case "albert":
            # "1995," is to be cut before the comma, which the original code does after the fact.
            return [(piece, score - 100 * _is_number_comma(piece)) for piece, score in pieces]
        case _:
            return pieces


def _is_number_comma(piece: str) -> bool:
    return piece.endswith(",") and piece[-2:-1].isdigit()


def _add_tokens(tokenizer: Tokenizer, model: Model, vocabulary: Vocabulary) -> None:
    """Let the text's own mention of a control piece, a sentinel or a user's symbol be that token, uncut."""
    kinds = {piece.piece: piece.type for piece in model.pieces}
    for token, _ in vocabulary:
        is_special = kinds.get(token) == _CONTROL or (token not in kinds and token.startswith("<extra_id_"))
        if is_special or kinds.get(token) == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])


def _family_normalizers(recipe: Recipe, settings: dict[str, Any]) -> list[normalizers.Normalizer]:
    """Return what the class does to a text before SentencePiece sees it."""
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
    """Return what SentencePiece itself does to a text, but for the spaces' spelling."""
    steps: list[normalizers.Normalizer] = []
    if "nfkc" in model.normalizer.name:
        # The table composes too, but the library looks up no sequence of six bytes or more in it: without
        # this, decomposed kana and Hangul would stay so.
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
    """Compare with the sentencepiece library on `PROBES`.

    Raises:
        SourceError: the pieces of one differ, or the library can't read the model.
    """
    import sentencepiece  # noqa: PLC0415 - only for checkpoints that have nothing better

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
                f"the tokenizer built from {path} cuts {probe!r} into {ids}, SentencePiece into {expected}: "
                "give a tokenizer.json with --tokenizer"
            )
