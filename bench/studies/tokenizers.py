"""Generates the tables and the picture of docs/tokenizers.md.

    python -m bench.studies.tokenizers BUNDLE [--picture docs/pictures/tokenizers.png]

Trains WordPiece, byte-level BPE and Unigram tokenizers of the same size on the training prose of
examples/train_masked.py, and compares them with the tokenizer of BUNDLE, which is one of all-MiniLM-L6-v2.
Held-out texts are the other prose, and the sentences of STS-B. The WordPiece trainer settles ties by chance,
so its tokens vary between runs.

A word is a run of letters and digits. A token belongs to a word if it covers a part of the word or of the
space before it.
"""

import argparse
import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tokenizers import Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import attnlens_server
from attnlens.reductions.maps import word_level
from attnlens.reductions.units import IndexArray, TextUnits
from attnlens_client import AttentionQuery, EncodedText
from bench.workloads import DATA
from examples.train_masked import PROSE, SPECIAL, train_tokenizer

VOCAB_SIZE = 2000
WORD = re.compile(r"\s*[^\W_]+")
EXAMPLE = "The naïve shopkeeper didn't unbelievably alphabetize 1,962 bookshelves."
DIFFICULT = "Two  spaces, Überraschung, 東京 and 😀."
# For "cross", "tired" has the largest weight of all tokens, "unbelievably" of all words.
TEXT, LAYER, HEAD = "The unbelievably tired animal didn't cross.", 0, 1
ATTENDING, SPLIT = 8, 2  # word indices of "cross" and "unbelievably"
NUM_SENTENCES = 200

Weights = npt.NDArray[np.float32]


class Fragmentation(NamedTuple):
    """How a tokenizer splits words."""

    tokens_per_word: float
    """All tokens of the texts, including punctuation, divided by the number of words."""
    split_share: float
    """Share of words with more than one token."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="Bundle of all-MiniLM-L6-v2.")
    parser.add_argument("--picture", type=Path, help="Output path of the picture.")
    args = parser.parse_args()
    prose = [json.loads(line)["text"] for line in PROSE.read_text(encoding="utf-8").splitlines()]
    last = len(prose) * 9 // 10
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        sentences = [row[0] for row in csv.reader(file)]
    tokenizers = train_all(prose[:last]) | {"MiniLM": open_tokenizer(args.bundle)}
    print_fragmentation(tokenizers, {"prose": prose[last:], "STS-B": sentences})
    print_example(tokenizers)
    print_weights(args.bundle, sentences[:NUM_SENTENCES], args.picture)


def train_all(texts: list[str]) -> dict[str, Tokenizer]:
    """Train one tokenizer per algorithm, each with the usual normalization."""
    wordpiece = train_tokenizer(texts, VOCAB_SIZE)
    wordpiece.decoder = decoders.WordPiece()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    options: Any = {"vocab_size": VOCAB_SIZE, "show_progress": False}
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, **options)
    )
    unigram.train_from_iterator(
        texts, trainers.UnigramTrainer(special_tokens=SPECIAL, unk_token=SPECIAL[1], **options)
    )
    return {"WordPiece": wordpiece, "BPE": bpe, "Unigram": unigram}


def open_tokenizer(bundle: Path) -> Tokenizer:
    """Return the tokenizer of a bundle or checkpoint, without truncation and padding."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokens_in(encoding: Encoding, start: int, end: int) -> list[str]:
    """Return the tokens that cover a part of text[start:end]."""
    return [
        token
        for token, (first, last) in zip(encoding.tokens, encoding.offsets, strict=True)
        if first < end and last > start
    ]


def fragmentation(tokenizer: Tokenizer, texts: Sequence[str]) -> Fragmentation:
    """Measure how a tokenizer splits the words of the texts."""
    num_tokens, counts = 0, []
    for text, encoding in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        num_tokens += len(encoding)
        counts += [len(tokens_in(encoding, *word.span())) for word in WORD.finditer(text)]
    return Fragmentation(num_tokens / len(counts), float(np.mean(np.array(counts) > 1)))


def restores(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether decoding the token ids of a text gives the text."""
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def print_fragmentation(tokenizers: Mapping[str, Tokenizer], texts: Mapping[str, Sequence[str]]) -> None:
    """Print the fragmentation of the texts, and the share of texts that decoding restores."""
    print(f"| tokenizer | vocabulary | {' | '.join(f'tokens per word, {name}' for name in texts)} |", end="")
    print(f" {' | '.join(f'words split, {name}' for name in texts)} |", end="")
    print(f" {' | '.join(f'restored, {name}' for name in texts)} |\n|{'---|' * (2 + 3 * len(texts))}")
    for name, tokenizer in tokenizers.items():
        found = [fragmentation(tokenizer, each) for each in texts.values()]
        restored = [np.mean([restores(tokenizer, text) for text in each]) for each in texts.values()]
        cells = [name, f"{tokenizer.get_vocab_size():,}", *(f"{each.tokens_per_word:.2f}" for each in found)]
        cells += [f"{100 * each.split_share:.0f} %" for each in found]
        print(f"| {' | '.join([*cells, *(f'{100 * share:.0f} %' for share in restored)])} |")


def print_example(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Print the tokens of each word of the example, and the difficult text after decoding."""
    print(f"\n| word | {' | '.join(tokenizers)} |\n|{'---|' * (1 + len(tokenizers))}")
    encodings = [each.encode(EXAMPLE, add_special_tokens=False) for each in tokenizers.values()]
    for word in re.finditer(r"\s*\S+", EXAMPLE):
        cells = [" ".join(f"`{token}`" for token in tokens_in(each, *word.span())) for each in encodings]
        print(f"| {word[0].strip()} | {' | '.join(cells)} |")
    print(f"| words of the tokenizer | {' | '.join(str(len({*each.word_ids})) for each in encodings)} |\n")
    for name, tokenizer in tokenizers.items():
        ids = tokenizer.encode(DIFFICULT, add_special_tokens=False).ids
        print(f"{name} restores {DIFFICULT!r} as {tokenizer.decode(ids)!r}")


def print_weights(bundle: Path, sentences: Sequence[str], picture: Path | None) -> None:
    """Print a row and a column of a head before and after merging, and the effect on the largest weights."""
    with attnlens_server.local(bundle, threads=1) as model:
        [text, *others] = model.encode([TEXT, *sentences], attention=[AttentionQuery()])
    head, units = text.attention[0].weights[LAYER, HEAD], units_of(text)
    [merged] = word_level(head[np.newaxis], units.words)
    spellings = np.array([token.text for token in text.tokens])
    attending = units.words == ATTENDING
    print("\n| attended word | tokens | weights | sum | mean | share of tokens |")
    print("|---|---|---|---|---|---|")
    for word, total in enumerate(merged[ATTENDING]):
        own = units.words == word
        weights = head[attending][0, own]
        cells = [" ".join(spellings[own]), " + ".join(f"{weight:.3f}" for weight in weights)]
        cells += [f"{total:.3f}", f"{weights.mean():.3f}", f"{own.mean():.3f}"]
        print(f"| {word} | {' | '.join(cells)} |")
    split = units.words == SPLIT
    print("\nfrom each token of the split word to the attending word, and from the word:")
    print(
        *(f"{weight:.3f}" for weight in head[split][:, attending].sum(axis=1)),
        f"{merged[SPLIT, ATTENDING]:.3f}",
    )
    split_texts = [each for each in others if (np.bincount(units_of(each).words) > 1).any()]
    changed = [changes(each.attention[0].weights, units_of(each)).ravel() for each in split_texts]
    print(f"\n{len(split_texts)} of {len(others)} sentences have a split word.", end=" ")
    print(
        f"Merging changes the largest weight of {100 * np.concatenate(changed).mean():.1f} % of their rows."
    )
    if picture:
        draw_maps(picture, head, merged, spellings, units.words)


def units_of(text: EncodedText) -> TextUnits:
    """Return the words and special tokens of a text."""
    is_special = [token.is_special for token in text.tokens]
    return TextUnits.of([token.word_index for token in text.tokens], is_special, [False] * len(is_special))


def changes(maps: Weights, units: TextUnits) -> npt.NDArray[np.bool_]:
    """Return whether the largest weight on a token and the largest weight on a word are on different words.

    Args:
        maps: (..., T, T).
        units: Words and special tokens. Special tokens are ignored.

    Returns:
        (heads, words) for each head and attending word.
    """
    maps = maps.reshape(-1, *maps.shape[-2:])  # (H, T, T)
    by_word = word_level(maps, units.words).copy()  # (H, W, W)
    number = by_word.shape[1]
    by_query = np.stack([maps[:, units.words == word].mean(axis=1) for word in range(number)], axis=1)
    special_words = np.unique(units.words[units.is_special])
    by_query[:, :, units.is_special] = by_word[:, :, special_words] = -1
    differs = units.words[by_query.argmax(axis=-1)] != by_word.argmax(axis=-1)  # (H, W)
    return np.asarray(np.delete(differs, special_words, axis=1))


def draw_maps(
    path: Path, tokens: Weights, words: Weights, spellings: npt.NDArray[np.str_], of: IndexArray
) -> None:
    """Draw the head before and after merging, with frames around the tokens of each word that is split."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [
        "".join(token.removeprefix("##") for token in spellings[of == word]) for word in range(len(words))
    ]
    for axes, maps, labels in ((left, tokens, spellings), (right, words, names)):
        image = axes.imshow(np.sqrt(maps), cmap="viridis", vmin=0, vmax=float(np.sqrt(words.max())))
        axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlabel("attended to (key)")
    left.set(title="tokens", ylabel="attends (query)")
    right.set(title="words: sum over keys, mean over queries")
    start, size = int((of < SPLIT).sum()), int((of == SPLIT).sum())
    for axes, first, length, end in ((left, start, size, len(tokens)), (right, SPLIT, 1, len(words))):
        frame(axes, first, length, end)
    scale = figure.colorbar(image, ax=[left, right], shrink=0.8, label="attention weight")
    shown = (0.01, 0.05, 0.1, 0.2, 0.3)
    scale.set_ticks([weight**0.5 for weight in shown], labels=[str(weight) for weight in shown])
    figure.savefig(path, dpi=110)


def frame(axes: Axes, first: int, length: int, end: int) -> None:
    """Draw frames around the columns and rows of a word."""
    for corner, width, height in (
        ((first - 0.5, -0.5), length, end),
        ((-0.5, first - 0.5), end, length),
    ):
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="#D55E00", linewidth=1.6))


if __name__ == "__main__":
    main()
