"""Trains a small encoder on the CPU, beside one with plain attention, and serves what it has learned.

    python examples/train_masked.py --attention mixture
    python examples/train_masked.py --attention '{"kind": "longformer", "window": 4}' --steps 800

The encoder learns to name words that are hidden from it, as BERT did (Devlin et al. 2018, section 3.1), in
the prose of tests/data/passages.jsonl. Its attention can be of every kind. Another encoder, with plain
softmax attention, sees the same batches for as many steps. Then the first becomes a checkpoint, which the
commands that a user would type export, serve and look at.

So few steps on a part of one book show that a mechanism learns, not how good it is.

Letters in shapes: B batch, T tokens, D width, V vocabulary, N hidden tokens.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from attnlens_model import ConfigError, Encoder, EncoderConfig
from attnlens_model.attention.mixture import load_balance_loss, recorded_routing

ATTNLENS = [sys.executable, "-m", "attnlens_cli.main"]
PROSE = Path(__file__).parents[1] / "tests" / "data" / "passages.jsonl"
SENTENCE = "The old man sat by the river and looked at the new houses."
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL))
NOT_HIDDEN = -100
BALANCE_WEIGHT = 0.01
# No dropout, here and below: so few steps are far from learning the prose by heart.
PLAIN: dict[str, object] = {"kind": "softmax", "num_heads": 4, "dropout": 0.0}
MECHANISMS: dict[str, dict[str, object]] = {
    "disentangled": {"terms": "c2p|p2c"},
    "longformer": {"window": 8},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "overlapping": {"overlap": 4},
    "mixture": {"shared_heads": 1, "active_heads": 2},
}
"""What a kind of attention has here beside what is plain, unless the command line says otherwise."""
TOP = ["--top", "3"]
VIEWS = {"mixture": [TOP, ["--gates"]], "composed": [TOP, ["--composed", *TOP]]}
"""What is asked of each kind beside `TOP` alone."""


class Sizes(NamedTuple):
    """How large the encoders are, and how they are trained."""

    vocab_size: int = 2000
    hidden_size: int = 128
    num_layers: int = 4
    num_tokens: int = 64
    batch_size: int = 8
    steps: int = 400
    warm_up: int = 40
    learning_rate: float = 2e-3


class MaskedLanguageModel(nn.Module):
    """An encoder that names hidden tokens: scores are products with the token embeddings, plus a bias."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.bias = nn.Parameter(torch.zeros(config.embeddings.vocab_size))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the N hidden tokens, in nats; both are (B, T) int64."""
        hidden_states = self.encoder(input_ids, torch.ones_like(input_ids)).last_hidden_state  # (B, T, D)
        is_hidden = labels != NOT_HIDDEN
        # Of hidden tokens alone: the vocabulary is the widest thing here.
        scores = hidden_states[is_hidden] @ self.encoder.embeddings.token.weight.T + self.bias  # (N, V)
        return nn.functional.cross_entropy(scores, labels[is_hidden])


def main() -> None:
    """Train, save, export, serve, look."""
    parser = argparse.ArgumentParser(description="Train a small encoder with the attention of your choice.")
    parser.add_argument("--attention", default="softmax", help="a kind, or a JSON object with its keys")
    parser.add_argument("--steps", type=int, default=Sizes().steps)
    parser.add_argument("--output", type=Path, help="a directory  [default: bundles/masked-KIND]")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    sizes = Sizes(steps=args.steps)
    try:
        attention = read_attention(args.attention)
        config = make_config(attention, sizes)
    except ConfigError as error:
        sys.exit(f"--attention: {error}")
    kind = str(attention["kind"])
    output = args.output or Path("bundles") / f"masked-{kind}"
    tokenizer, train_ids, held_out_ids = read_prose(sizes.vocab_size)
    plain = make_config(PLAIN, sizes)
    configs = {kind: config} if config == plain else {"plain": plain, kind: config}
    trained = compare(configs, sizes, train_ids, held_out_ids)
    save(trained[kind].encoder, tokenizer, output / "checkpoint")
    look(output, kind)


def read_attention(text: str) -> dict[str, object]:
    """Return the attention that the command line asks for, completed from `MECHANISMS`.

    Raises:
        ConfigError: JSON with an error.
    """
    stated = {"kind": text}
    if text.lstrip().startswith("{"):
        try:
            stated = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{text} is not JSON: {error}") from error
    return PLAIN | MECHANISMS.get(str(stated.get("kind")), {}) | stated


def make_config(attention: Mapping[str, object], sizes: Sizes) -> EncoderConfig:
    """Return an encoder of the family `attnlens`, which can state every combination of parts.

    Raises:
        ConfigError: an unknown kind of attention, or a value that it can't have.
    """
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": sizes.hidden_size,
            "num_layers": sizes.num_layers,
            "hidden_dropout": 0.0,
            "embeddings": {"vocab_size": sizes.vocab_size, "type_vocab_size": 0},
            "positions": {"max_position_embeddings": sizes.num_tokens},
            "attention": attention,
            "feed_forward": {"intermediate_size": 4 * sizes.hidden_size},
            # Trains at this rate after a short warm-up, which norms after the sums would not.
            "norm": {"placement": "pre", "eps": 1e-5},
        }
    )


def read_prose(vocab_size: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """Return a tokenizer, and the ids of nine tenths of the prose and of the rest, each in one row."""
    passages = [json.loads(line)["text"] for line in PROSE.read_text(encoding="utf-8").splitlines()]
    last = len(passages) * 9 // 10
    tokenizer = train_tokenizer(passages[:last], vocab_size)
    texts = tokenizer.encode_batch(passages, add_special_tokens=False)
    train, held_out = (
        [token for text in part for token in text.ids] for part in (texts[:last], texts[last:])
    )
    return tokenizer, torch.tensor(train), torch.tensor(held_out)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Return a lower-casing WordPiece that puts [CLS] before a text and [SEP] after it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[UNK]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return tokenizer


def draw_batches(ids: Tensor, sizes: Sizes, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what `hide` returns without end, of pieces that begin anywhere in the prose."""
    random, length = torch.Generator().manual_seed(seed), sizes.num_tokens - 2
    while True:
        starts = torch.randint(len(ids) - length + 1, (sizes.batch_size, 1), generator=random)
        pieces = ids[starts + torch.arange(length)]  # (B, T - 2)
        first, last = torch.full_like(starts, CLS), torch.full_like(starts, SEP)
        yield hide(torch.cat([first, pieces, last], dim=1), sizes.vocab_size, random)


def hide(texts: Tensor, vocab_size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hide 15 % of the tokens (B, T): 80 % of them become [MASK], 10 % another token, 10 % stay.

    Returns:
        The texts, and labels (B, T): the token where it was hidden, else `NOT_HIDDEN`.
    """
    is_hidden = (torch.rand(texts.shape, generator=random) < 0.15) & (texts >= len(SPECIAL))
    chance = torch.rand(texts.shape, generator=random)
    others = torch.randint(len(SPECIAL), vocab_size, texts.shape, generator=random)
    input_ids = torch.where(is_hidden & (chance < 0.8), MASK, texts)
    input_ids = torch.where(is_hidden & (chance >= 0.9), others, input_ids)
    return input_ids, torch.where(is_hidden, texts, NOT_HIDDEN)


class Trainer:
    """A model with AdamW, whose rate rises and then falls linearly, and with clipped gradients."""

    def __init__(self, config: EncoderConfig, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.model = MaskedLanguageModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), sizes.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / sizes.warm_up, (sizes.steps - step) / sizes.steps),
        )
        self.seconds = 0.0

    def step(self, input_ids: Tensor, labels: Tensor) -> float:
        """Change the weights once and return the loss before."""
        started = time.monotonic()
        self.optimizer.zero_grad()
        with recorded_routing(self.model) as routings:
            loss: Tensor = self.model(input_ids, labels)
        # For a mixture of heads alone: others have no routers.
        mask, total = torch.ones_like(input_ids), loss
        for routing in routings:
            total = total + BALANCE_WEIGHT * load_balance_loss(routing, mask) / len(routings)
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds += time.monotonic() - started
        return loss.item()


def compare(
    configs: Mapping[str, EncoderConfig], sizes: Sizes, train_ids: Tensor, held_out_ids: Tensor
) -> dict[str, MaskedLanguageModel]:
    """Train models side by side, print their losses, and return them in eval mode."""
    trainers = {name: Trainer(config, sizes) for name, config in configs.items()}
    print_row("", *trainers)
    print_row("weights", *(sum(p.numel() for p in one.model.parameters()) for one in trainers.values()))
    losses: list[list[float]] = []
    batches, every = draw_batches(train_ids, sizes, seed=1), max(1, sizes.steps // 10)
    for step in range(1, sizes.steps + 1):
        batch = next(batches)
        losses.append([trainer.step(*batch) for trainer in trainers.values()])
        if step == 1 or step % every == 0:
            print_row(f"step {step}", *(sum(column) / len(column) for column in zip(*losses, strict=True)))
            losses.clear()
    trained = {name: trainer.model.eval() for name, trainer in trainers.items()}
    print_row("held-out", *(evaluate(model, sizes, held_out_ids) for model in trained.values()))
    print_row("seconds", *(trainer.seconds for trainer in trainers.values()))
    guess = frequency_loss(train_ids, held_out_ids, sizes.vocab_size)
    print(f"Losses are means since the row before. Whoever knew only how frequent words are had {guess:.3f}.")
    return trained


def print_row(label: str, *cells: object) -> None:
    texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"{label:>10}" + "".join(f"{text:>14}" for text in texts), flush=True)


@torch.inference_mode()
def evaluate(model: MaskedLanguageModel, sizes: Sizes, ids: Tensor) -> float:
    """Return the mean loss of 16 batches, the same for all models."""
    batches = draw_batches(ids, sizes, seed=2)
    losses = torch.stack([model(*next(batches)) for _ in range(16)])
    return losses.mean().item()


def frequency_loss(train_ids: Tensor, held_out_ids: Tensor, vocab_size: int) -> float:
    """Return the loss of guessing by the frequencies of tokens alone; each token counts once more."""
    counts = torch.bincount(train_ids, minlength=vocab_size) + 1.0
    return -(counts / counts.sum())[held_out_ids].log().mean().item()


def save(encoder: Encoder, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a checkpoint: config.json, model.safetensors, tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    content = json.dumps(encoder.config.to_hugging_face(), indent=2) + "\n"
    (directory / "config.json").write_text(content, encoding="utf-8")
    save_file(encoder.state_dict(), directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))


def look(output: Path, kind: str) -> None:
    """Export the checkpoint, serve the bundle, and ask what attends to what."""
    bundle = str(output / "bundle")
    names = ["--output", bundle, "--name", f"masked-{kind}", "--force"]
    run("export", str(output / "checkpoint"), *names, "--pooling", "mean")
    print(f"\n$ attnlens serve {bundle} --port 0 &", flush=True)
    command = [*ATTNLENS, "--log-level", "warning", "serve", bundle, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            print(ready, end="")
            address = ready.split(" is ready at ")[1].split(": ")[0]
            for view in VIEWS.get(kind, [TOP]):
                run("attend", SENTENCE, "--address", address, *view)
        finally:
            server.terminate()
    print(f"\nThe bundle stays in {bundle}: attnlens serve {bundle}")


def run(*words: str) -> None:
    """Show a command as a user would type it, and run it."""
    print(f"\n$ attnlens {shlex.join(words)}", flush=True)
    subprocess.run([*ATTNLENS, *words], check=True)


if __name__ == "__main__":
    main()
