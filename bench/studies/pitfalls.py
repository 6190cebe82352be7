"""Generates the table and the pictures of docs/pitfalls.md: the effect of each attention mistake on training.

    python -m bench.studies.pitfalls [--steps 300] [--seeds 3] [--pictures docs/pictures]

Trains small causal language models (2 layers, hidden size 64, 4 heads) on the prose of
examples/train_masked.py. The models differ only in the attention layer, which is one of
examples/attention_pitfalls.py. Half of each batch is padded.

- training: mean loss of the last tenth of the steps.
- held-out: loss on other prose, computed for all tokens of a text at once, as in training.
- prefix only: loss on the same prose if the model gets only the tokens before the predicted one, as in
  generation.
- padding: change of the held-out loss of a text when 16 padding tokens are appended.
- entropy: mean entropy of attention rows in the first layer at initialization, relative to uniform attention.

Losses are in nats, mean over seeds, with the range over seeds.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import attention_pitfalls as pitfalls
from examples.train_masked import PAD, read_prose

HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, NUM_TOKENS, BATCH_SIZE, VOCAB_SIZE = 64, 4, 2, 48, 16, 2000
LEARNING_RATE, DROPOUT, NUM_PADDING = 3e-3, 0.1, 16
PREFIX_LENGTHS = (8, 16, 24, 32, 40)
LAYERS = (
    pitfalls.SelfAttention,
    pitfalls.SoftmaxOverQueries,
    pitfalls.ViewInsteadOfTranspose,
    pitfalls.NoScaling,
    pitfalls.ScaledByHiddenSize,
    pitfalls.NoCausalMask,
    pitfalls.CausalMaskAfterSoftmax,
    pitfalls.PaddingIgnored,
    pitfalls.StandardNormalInitialization,
    pitfalls.DropoutInEvaluation,
    pitfalls.DropoutWithoutRescaling,
    pitfalls.DropoutBeforeSoftmax,
    pitfalls.SharedHeads,
    pitfalls.DetachedKeys,
)
MAPS = (
    pitfalls.SelfAttention,
    pitfalls.NoCausalMask,
    pitfalls.SoftmaxOverQueries,
    pitfalls.NoScaling,
    pitfalls.StandardNormalInitialization,
)


class Block(nn.Module):
    """A pre-norm layer with the attention layer to be studied."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm, self.norm = nn.LayerNorm(HIDDEN_SIZE), nn.LayerNorm(HIDDEN_SIZE)
        self.feed_forward = nn.Sequential(
            nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE), nn.GELU(), nn.Linear(4 * HIDDEN_SIZE, HIDDEN_SIZE)
        )

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.attention_norm(hidden_states), mask)[0]
        hidden_states = hidden_states + attended
        return hidden_states + torch.as_tensor(self.feed_forward(self.norm(hidden_states)))


class LanguageModel(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, layer: type[pitfalls.SelfAttention]) -> None:
        super().__init__()
        causal = layer if layer.is_causal else type(layer.__name__, (layer,), {"is_causal": True})
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.positions = nn.Embedding(NUM_TOKENS + NUM_PADDING, HIDDEN_SIZE)
        self.blocks = nn.ModuleList(Block(causal(HIDDEN_SIZE, NUM_HEADS, DROPOUT)) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return scores (B, T, V) for token ids (B, T)."""
        hidden_states = self.embed(input_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, input_ids != PAD)
        return torch.as_tensor(self.norm(hidden_states) @ self.embedding.weight.T)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the input of the first layer, (B, T, D)."""
        return torch.as_tensor(self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1])))


class Result(NamedTuple):
    """Measurements of one model."""

    training: float
    held_out: float
    prefix_only: float
    padding: float
    entropy: float


def draw_batches(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield token ids (B, T + 1). The second half of a batch is padded."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - NUM_TOKENS, (BATCH_SIZE, 1), generator=random)
        batch = ids[starts + torch.arange(NUM_TOKENS + 1)]
        lengths = torch.randint(NUM_TOKENS // 4, NUM_TOKENS, (BATCH_SIZE // 2, 1), generator=random)
        batch[BATCH_SIZE // 2 :][torch.arange(NUM_TOKENS + 1) >= lengths] = PAD
        yield batch


def loss_of(model: LanguageModel, batch: Tensor) -> Tensor:
    """Return the mean loss of all tokens that are followed by a token."""
    scores = model(batch[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)


def measure(
    layer: type[pitfalls.SelfAttention], train: Tensor, held_out: Tensor, steps: int, seed: int
) -> Result:
    """Train and measure one model."""
    torch.manual_seed(seed)
    model = LanguageModel(layer)
    texts = held_out[: len(held_out) // (NUM_TOKENS + 1) * (NUM_TOKENS + 1)].view(-1, NUM_TOKENS + 1)[:64]
    entropy = relative_entropy(model, texts)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    losses, batches = [], draw_batches(train, seed)
    for _ in range(steps):
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        whole = loss_of(model, texts).item()
        padded = loss_of(model, nn.functional.pad(texts, (0, NUM_PADDING), value=PAD)).item()
        prefixes = [
            nn.functional.cross_entropy(model(texts[:, :length])[:, -1], texts[:, length]).item()
            for length in PREFIX_LENGTHS
        ]
    return Result(
        statistics.mean(losses[-max(1, steps // 10) :]),
        whole,
        statistics.mean(prefixes),
        padded - whole,
        entropy,
    )


def relative_entropy(model: LanguageModel, texts: Tensor) -> float:
    """Return the mean entropy of attention rows in the first layer, relative to uniform attention."""
    block = model.blocks[0].eval()
    with torch.no_grad():
        states = block.get_submodule("attention_norm")(model.embed(texts))
        weights: Tensor = block.get_submodule("attention")(states, texts != PAD)[1]
    model.train()
    rows = torch.special.entr(weights.clamp(min=0)).sum(dim=-1).mean(dim=(0, 1))[1:]
    return float((rows / torch.arange(2, len(rows) + 2).log()).mean())


def draw_maps(path: Path) -> None:
    """Draw the attention of one head of untrained layers for the same input."""
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    states = torch.randn(1, 24, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    for axes, layer in zip(figure.subplots(1, len(MAPS)), MAPS, strict=True):
        torch.manual_seed(1)
        causal: Any = layer if layer.is_causal else type(layer.__name__, (layer,), {"is_causal": True})
        with torch.no_grad():
            weights = causal(HIDDEN_SIZE, NUM_HEADS).eval()(states)[1][0, 0]
        axes.imshow(weights.sqrt(), cmap="viridis", vmin=0, vmax=1)
        axes.set_title("correct" if layer is pitfalls.SelfAttention else layer.__name__, fontsize=8)
        axes.set_xlabel("attended to (key)", fontsize=7)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(path, dpi=110)


def draw_losses(path: Path, results: dict[str, list[Result]]) -> None:
    """Draw the held-out loss and the loss with prefixes only."""
    figure = Figure(figsize=(8, 0.32 * len(results) + 0.9), layout="constrained")
    axes = figure.subplots()
    names = list(results)[::-1]
    for offset, field, color in ((0.18, "held_out", "#0072B2"), (-0.18, "prefix_only", "#D55E00")):
        values = [statistics.mean(getattr(each, field) for each in results[name]) for name in names]
        label = "all tokens at once" if field == "held_out" else "prefix only, as in generation"
        axes.barh([index + offset for index in range(len(names))], values, 0.36, color=color, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("held-out loss, nats")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train all models and print the table."""
    parser = argparse.ArgumentParser(description="Measure the effect of attention mistakes on training.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pictures", type=Path, help="Directory for the pictures of docs/pitfalls.md.")
    args = parser.parse_args()
    _tokenizer, train, held_out = read_prose(VOCAB_SIZE)
    print("| layer | training | held-out | prefix only | padding | entropy |\n|---|---|---|---|---|---|")
    results: dict[str, list[Result]] = {}
    for layer in LAYERS:
        name = "correct" if layer is pitfalls.SelfAttention else layer.__name__
        found = [measure(layer, train, held_out, args.steps, seed) for seed in range(args.seeds)]
        results[name] = found
        cells = []
        for index, digits in enumerate((2, 2, 2, 3, 2)):
            values = [each[index] for each in found]
            half = (max(values) - min(values)) / 2
            cells.append(f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if args.pictures:
        draw_losses(args.pictures / "pitfalls_losses.png", results)
        draw_maps(args.pictures / "pitfalls_maps.png")


if __name__ == "__main__":
    main()
