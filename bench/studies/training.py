"""Generates the tables and the pictures of docs/training.md: the effect of attention choices on training.

    python -m bench.studies.training [--steps 600] [--seeds 3] [--pictures docs/pictures] [--rows NAME ...]

Trains small masked language models (2 layers, hidden size 64, texts of 16 tokens) with the parts of
examples/train_masked.py. The vocabulary has 100 entries, so tokens are mostly letters, and neighboring tokens
predict a token better than its frequency does. Position embeddings are initialized with sinusoids, because
random ones are learned too slowly.

Models of the same seed are trained on the same batches and start from the same weights, as far as their
tensors have the same names and shapes. Differences from a baseline are therefore paired by seed. Intervals
are 95 % intervals of the mean over seeds (t distribution). Losses are in nats per predicted token.

Shape legend: B batch, T tokens, L layers, H heads, D hidden size, N predicted tokens, M properties.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from scipy.stats import t as t_distribution
from torch import Tensor

from examples.train_masked import (
    MECHANISMS,
    NOT_MASKED,
    PLAIN,
    SPECIAL,
    MaskedLanguageModel,
    Sizes,
    Trainer,
    draw_batches,
    evaluate,
    frequency_loss,
    make_config,
    read_prose,
)

SIZES = Sizes(
    vocab_size=100, hidden_size=64, num_layers=2, num_tokens=16, batch_size=64, steps=600, learning_rate=4e-3
)
POSITION_STD = 0.035
HELD_OUT_TEXTS, HELD_OUT_SEED = 256, 2
BASELINE = "4 heads"


class Row(NamedTuple):
    """Attention options of a model, in addition to `PLAIN`, and the model that it is compared with."""

    options: dict[str, object]
    baseline: str = BASELINE


ROWS = {
    BASELINE: Row({}),
    "1 head": Row({"num_heads": 1}),
    "2 heads": Row({"num_heads": 2}),
    "8 heads": Row({"num_heads": 8}),
    "uniform attention": Row({"scale": 1e-6}),
    "4 heads, no scaling": Row({"scale": 1.0}),
    "1 head, no scaling": Row({"num_heads": 1, "scale": 1.0}, "1 head"),
    # Smaller than the defaults of examples/train_masked.py, which cover a whole text of 16 tokens.
    "longformer": Row({"kind": "longformer", "window": 3}),
    "big_bird": Row({"kind": "big_bird", "block_size": 2, "num_random_blocks": 1}),
    "overlapping": Row({"kind": "overlapping", **MECHANISMS["overlapping"]}),
    "mixture": Row({"kind": "mixture", **MECHANISMS["mixture"]}),
    "composed": Row({"kind": "composed"}),
    "disentangled": Row({"kind": "disentangled", **MECHANISMS["disentangled"]}),
}
PROPERTIES = ("entropy", "previous", "next", "own", "special")
TITLES = (
    "entropy, relative to uniform",
    "weight of the previous token",
    "weight of the next token",
    "weight of the token itself",
    "weight of [CLS] and [SEP]",
)
CHECKPOINTS = (0, 10, 30, 100, 200, 300, 400, 500, 600)
"""Steps after which the attention of the baseline is measured, in addition to the last one."""


class Prose(NamedTuple):
    """Token ids of the training and held-out prose."""

    train: Tensor
    held_out: Tensor


class Moment(NamedTuple):
    """A model during training."""

    step: int
    loss: float
    attention: Tensor
    """(M, L, H): properties of each head, see `attention_properties`."""


class Result(NamedTuple):
    """A trained model."""

    loss: float
    num_parameters: int
    moments: list[Moment]


class Interval(NamedTuple):
    """Mean and half of the width of its 95 % interval."""

    mean: float
    half: float

    def show(self, sign: str = "") -> str:
        return f"{self.mean:{sign}.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least two values, and its 95 % interval according to the t distribution."""
    quantile = float(t_distribution.ppf(0.975, len(values) - 1))
    return Interval(statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values)))


def paired_interval(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the mean difference of values with the same seed, and its interval."""
    return interval([value - other for value, other in zip(values, baseline, strict=True)])


def read_sorted_prose(vocab_size: int) -> Prose:
    """Return the prose of `read_prose` with token ids in the order of their spellings.

    The tokenizer assigns other ids in each run, which changes initial weights and random tokens.
    """
    tokenizer, train_ids, held_out_ids = read_prose(vocab_size)
    special, num_ids = [*range(len(SPECIAL))], tokenizer.get_vocab_size()
    order = special + sorted(
        range(len(SPECIAL), num_ids), key=lambda token: str(tokenizer.id_to_token(token))
    )
    new_ids = torch.empty(num_ids, dtype=torch.int64)
    new_ids[order] = torch.arange(num_ids)
    return Prose(new_ids[train_ids], new_ids[held_out_ids])


def sinusoids(num_tokens: int, size: int) -> Tensor:
    """Return position embeddings (T, D) of sines and cosines (Vaswani et al. 2017, section 3.5)."""
    angles = torch.arange(num_tokens)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)  # (T, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def make_trainer(options: dict[str, object], sizes: Sizes, seed: int) -> Trainer:
    """Return a trainer whose initial weights are determined by the seed."""
    config = make_config(PLAIN | options, sizes)
    trainer = Trainer(config, sizes)
    torch.manual_seed(seed)
    weights = MaskedLanguageModel(config).state_dict()
    positions = sinusoids(sizes.num_tokens, sizes.hidden_size)
    weights["encoder.embeddings.position.weight"] = positions * (POSITION_STD / positions.std())
    trainer.model.load_state_dict(weights)
    return trainer


def train(row: Row, sizes: Sizes, prose: Prose, seed: int, checkpoints: Sequence[int] = ()) -> Result:
    """Train a model, measure it at checkpoints, and evaluate it."""
    trainer = make_trainer(row.options, sizes, seed)
    batches, moments = draw_batches(prose.train, sizes, seed), []
    for step in range(sizes.steps + 1):
        if step in checkpoints:
            moments.append(observe(trainer.model, sizes, prose.held_out, step))
        if step < sizes.steps:
            trainer.step(*next(batches))
    loss = held_out_loss(trainer.model, sizes, prose.held_out)
    return Result(loss, sum(parameter.numel() for parameter in trainer.model.parameters()), moments)


def held_out_loss(model: MaskedLanguageModel, sizes: Sizes, held_out: Tensor) -> float:
    """Return the loss on excerpts and masks that are the same for all models."""
    model.eval()
    return evaluate(model, sizes._replace(batch_size=HELD_OUT_TEXTS), held_out)


def observe(model: MaskedLanguageModel, sizes: Sizes, held_out: Tensor, step: int) -> Moment:
    """Measure loss and attention of a model, and return to training."""
    batches = draw_batches(held_out, sizes._replace(batch_size=HELD_OUT_TEXTS), HELD_OUT_SEED)
    moment = Moment(step, held_out_loss(model, sizes, held_out), attention_properties(model, *next(batches)))
    model.train()
    return moment


@torch.inference_mode()
def attention_properties(model: MaskedLanguageModel, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of each of `PROPERTIES` over the predicted tokens, (M, L, H).

    Only attention from these tokens is measured, because a loss is only computed for them.

    Args:
        model: A model whose layers have attention weights (B, H, T, T).
        input_ids: (B, T) int64. The first and the last token are special tokens.
        labels: (B, T) int64, `NOT_MASKED` unless the token is predicted.
    """
    output = model.encoder(input_ids, torch.ones_like(input_ids), output_attentions=True)
    weights = torch.stack(output.attentions, dim=1)  # (B, L, H, T, T)
    properties = torch.stack(
        [
            torch.special.entr(weights).sum(dim=-1)[..., 1:-1] / math.log(weights.shape[-1]),
            weights.diagonal(-1, dim1=-2, dim2=-1)[..., :-1],
            weights.diagonal(1, dim1=-2, dim2=-1)[..., 1:],
            weights.diagonal(dim1=-2, dim2=-1)[..., 1:-1],
            weights[..., 1:-1, 0] + weights[..., 1:-1, -1],
        ]
    )  # (M, B, L, H, T - 2)
    return properties.movedim(1, 3)[..., labels[:, 1:-1] != NOT_MASKED].mean(dim=-1)


def print_losses(results: dict[str, list[Result]]) -> None:
    """Print the table of held-out losses."""
    print("| model | parameters | held-out loss | compared with | difference |\n|---|---|---|---|---|")
    for name, found in results.items():
        baseline = ROWS[name].baseline
        losses = [result.loss for result in found]
        cells = [name, f"{found[0].num_parameters:,}", interval(losses).show()]
        if name == baseline:
            cells += ["", ""]
        else:
            cells += [
                baseline,
                paired_interval(losses, [result.loss for result in results[baseline]]).show("+"),
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


def print_attention(found: list[Result]) -> None:
    """Print the attention of the baseline during training: mean, minimum and maximum over seeds and heads."""
    print(f"| step | loss | {' | '.join(PROPERTIES)} |\n|---|---|{'---|' * len(PROPERTIES)}")
    for moments in zip(*(result.moments for result in found), strict=True):
        attention = torch.stack([moment.attention for moment in moments])  # (seeds, M, L, H)
        cells = [str(moments[0].step), f"{statistics.mean(moment.loss for moment in moments):.2f}"]
        cells += [
            f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"
            for values in attention.unbind(1)
        ]
        print(f"| {' | '.join(cells)} |")


def draw_losses(path: Path, results: dict[str, list[Result]]) -> None:
    """Draw the differences from the baselines: one point per seed, and the interval of the mean."""
    names = [name for name in results if ROWS[name].baseline != name][::-1]
    figure = Figure(figsize=(8, 0.36 * len(names) + 1.1), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(names):
        baseline = results[ROWS[name].baseline]
        differences = [a.loss - b.loss for a, b in zip(results[name], baseline, strict=True)]
        mean, half = interval(differences)
        axes.errorbar(mean, index, xerr=half, fmt="s", color="#0072B2", capsize=4)
        axes.plot(differences, [index + 0.22] * len(differences), "o", color="#D55E00", markersize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    labels = [f"{name} (vs. {ROWS[name].baseline})" for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=9)
    axes.set_xlabel("difference in held-out loss, nats: mean with 95 % interval (square), seeds (dots)")
    figure.savefig(path, dpi=110)


def draw_attention(path: Path, moments: list[Moment], num_tokens: int) -> None:
    """Draw the properties of each head of one model during training."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    uniform = (1.0, 1 / num_tokens, 1 / num_tokens, 1 / num_tokens, 2 / num_tokens)
    steps = [moment.step for moment in moments]
    attention = torch.stack([moment.attention for moment in moments])  # (steps, M, L, H)
    loss_axes, *rest = figure.subplots(2, 3).flat
    loss_axes.plot(steps, [moment.loss for moment in moments], "o-", color="black", markersize=3)
    loss_axes.set_title("held-out loss, nats", fontsize=9)
    for axes, title, level, values in zip(rest, TITLES, uniform, attention.unbind(1), strict=True):
        for layer, (color, style) in enumerate(zip(("#0072B2", "#D55E00"), ("-", "--"), strict=True)):
            head, *_ = axes.plot(steps, values[:, layer], style, color=color, linewidth=1.2)
            head.set_label(f"head of layer {layer}")
        axes.axhline(level, color="gray", linestyle=":", label="uniform attention")
        axes.set_ylim(0, 1.03)
        axes.set_title(title, fontsize=9)
    rest[1].legend(fontsize=7, loc="upper left")
    for axes in (loss_axes, *rest):
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)


def run_rows(names: Iterable[str], sizes: Sizes, prose: Prose, num_seeds: int) -> dict[str, list[Result]]:
    """Train the models of rows and of their baselines."""
    selected = {*names, *(ROWS[name].baseline for name in names), BASELINE}
    results = {}
    for name in [name for name in ROWS if name in selected]:
        checkpoints = [step for step in CHECKPOINTS if step < sizes.steps] + [sizes.steps]
        results[name] = [
            train(ROWS[name], sizes, prose, seed, checkpoints if name == BASELINE else ())
            for seed in range(num_seeds)
        ]
        print(name, *(f"{result.loss:.4f}" for result in results[name]), file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Train all models, print the tables and draw the pictures."""
    parser = argparse.ArgumentParser(description="Measure the effect of attention choices on training.")
    parser.add_argument("--steps", type=int, default=SIZES.steps)
    parser.add_argument("--seeds", type=int, default=3, help="At least 2, for intervals.")
    parser.add_argument("--pictures", type=Path, help="Directory for the pictures of docs/training.md.")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="NAME", help=", ".join(ROWS)
    )
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: must be at least 2, because intervals need a variance")
    sizes = SIZES._replace(steps=args.steps)
    prose = read_sorted_prose(sizes.vocab_size)
    results = run_rows(args.rows, sizes, prose, args.seeds)
    print_losses(results)
    print(f"A unigram model has a loss of {frequency_loss(*prose, sizes.vocab_size):.3f}.\n")
    print_attention(results[BASELINE])
    if args.pictures:
        draw_losses(args.pictures / "training_losses.png", results)
        draw_attention(
            args.pictures / "training_attention.png", results[BASELINE][0].moments, sizes.num_tokens
        )


if __name__ == "__main__":
    main()
