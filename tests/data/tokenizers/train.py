"""Train the small tokenizers of this directory: `python tests/data/tokenizers/train.py`.

Each kind of tokenizer has a directory in the usual layout: the source files and the `tokenizer.json` that
transformers builds from them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, RobertaTokenizer, XLMRobertaTokenizer

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 300
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

# Characters that the passages lack. Written for this purpose.
SENTENCES = [
    "Zoë ate crème brûlée in a café; naïve, élan, déjà vu, Straße, Übung.",
    "İstanbul, ŒUVRE, office, fine print.",
    "東京 と 京都 に 行きました。 中文 日本語 한국어",
    "Привет, мир! Καλημέρα. שלום. नमस्ते",
    "😀 🎉 👍🏽 ❤️ 👩‍💻 🇳🇴 done",
]
# A small handwritten table instead of SentencePiece's nmt_nfkc, which takes 240 kB.
NORMALIZATION_RULES = {
    "\t": " ", "\n": " ", "\u3000": " ", "\u00a0": " ", "\u200b": " ",
    "ﬁ": "fi", "ﬂ": "fl", "①": "1", "\uff21": "A", "\u00ad": "", "…": "...",
    "e\u0301": "é", "e\u0300": "è", "i\u0308": "ï", "o\u0308": "ö",
}  # fmt: skip


def lines() -> Iterator[str]:
    """Yield the passages, and the sentences often enough to affect training."""
    for line in (HERE.parent / "passages.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]
    for _ in range(20):
        yield from SENTENCES


def train_wordpiece(directory: Path, *, lowercase: bool) -> None:
    """Write a BERT tokenizer: vocab.txt, tokenizer_config.json, tokenizer.json."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=BERT_SPECIAL, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(lines(), trainer)
    vocabulary = tokenizer.get_vocab()
    directory.mkdir(exist_ok=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    write_settings(directory, {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase})
    save(BertTokenizer(vocab=vocabulary, do_lower_case=lowercase), directory)


def train_byte_level(directory: Path) -> None:
    """Write a RoBERTa tokenizer: vocab.json, merges.txt, tokenizer_config.json, tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=ROBERTA_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(), trainer)
    directory.mkdir(exist_ok=True)
    tokenizer.model.save(str(directory))
    write_settings(directory, {"tokenizer_class": "RobertaTokenizer"})
    save(RobertaTokenizer(str(directory / "vocab.json"), str(directory / "merges.txt")), directory)


def train_unigram(directory: Path) -> None:
    """Write an XLM-RoBERTa tokenizer: sentencepiece.bpe.model, tokenizer_config.json, tokenizer.json."""
    directory.mkdir(exist_ok=True)
    rules = directory / "rules.tsv"
    lines_of_rules = [
        f"{code_points(text)}\t{code_points(replacement)}\n"
        for text, replacement in NORMALIZATION_RULES.items()
    ]
    rules.write_text("".join(lines_of_rules), encoding="utf-8")
    train_sentencepiece(directory / "sentencepiece.bpe", normalization_rule_tsv=str(rules))
    rules.unlink()
    write_settings(directory, {"tokenizer_class": "XLMRobertaTokenizer"})
    save(XLMRobertaTokenizer.from_pretrained(directory), directory)


def train_sentencepiece(prefix: Path, **changes: Any) -> None:
    """Write `prefix`.model with <unk>, <s>, </s> and pieces. `changes` overrides training options."""
    settings = {
        "vocab_size": VOCAB_SIZE - 2,
        "character_coverage": 0.9995,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(), model_prefix=str(prefix), **settings | changes
    )
    prefix.with_name(f"{prefix.name}.vocab").unlink()


def code_points(text: str) -> str:
    """Format a text as space-separated hexadecimal code points, as in SentencePiece rules."""
    return " ".join(f"{ord(character):X}" for character in text)


def write_settings(directory: Path, settings: dict[str, Any]) -> None:
    """Write tokenizer_config.json."""
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def save(tokenizer: Any, directory: Path) -> None:
    """Write tokenizer.json only."""
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    train_wordpiece(target / "wordpiece", lowercase=True)
    train_wordpiece(target / "wordpiece-cased", lowercase=False)
    train_byte_level(target / "byte-level")
    train_unigram(target / "unigram")
