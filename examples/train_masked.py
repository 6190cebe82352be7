"""Trains a small encoder on the CPU, compares it with a softmax baseline, and serves the result.

    python examples/train_masked.py --attention mixture
    python examples/train_masked.py --attention '{"kind": "longformer", "window": 4}' --steps 800

The encoder is trained with masked language modeling (Devlin et al. 2018, section 3.1) on the prose in
tests/data/passages.jsonl, with any attention mechanism. A baseline with softmax attention is trained on the
same batches. The encoder is then saved as a checkpoint, exported and served, and its attention is displayed.

A few hundred steps on part of one book show that a mechanism can be trained, not how well it performs.

Dimensions: B batch, T tokens, D hidden size, V vocabulary, N masked tokens.
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
NOT_MASKED = -100
BALANCE_WEIGHT = 0.01
# No dropout here or below, because a few steps do not overfit.
PLAIN: dict[str, object] = {"kind": "softmax", "num_heads": 4, "dropout": 0.0}
MECHANISMS: dict[str, dict[str, object]] = {
    "disentangled": {"terms": "c2p|p2c"},
    "longformer": {"window": 8},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "overlapping": {"overlap": 4},
    "mixture": {"shared_heads": 1, "active_heads": 2},
}
"""Default options of each attention kind, in addition to `PLAIN`."""
TOP = ["--top", "3"]
VIEWS = {"mixture": [TOP, ["--gates"]], "composed": [TOP, ["--composed", *TOP]]}
"""Options of the `attend` calls for each kind. Defaults to `TOP`."""


class Sizes(NamedTuple):
    """Model dimensions and training hyperparameters."""

    vocab_size: int = 2000
    hidden_size: int = 128
    num_layers: int = 4
    num_tokens: int = 64
    batch_size: int = 8
    steps: int = 400
    warm_up: int = 40
    learning_rate: float = 2e-3


class MaskedLanguageModel(nn.Module):
    """Encoder with a language modeling head that is tied to the token embeddings."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.bias = nn.Parameter(torch.zeros(config.embeddings.vocab_size))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the N masked tokens, in nats. Arguments are (B, T) int64."""
        hidden_states = self.encoder(input_ids, torch.ones_like(input_ids)).last_hidden_state  # (B, T, D)
        is_masked = labels != NOT_MASKED
        # Only compute logits of masked tokens, because the vocabulary is the largest dimension.
        scores = hidden_states[is_masked] @ self.encoder.embeddings.token.weight.T + self.bias  # (N, V)
        return nn.functional.cross_entropy(scores, labels[is_masked])


def main() -> None:
    """Train an encoder, save and export it, and display its attention."""
    parser = argparse.ArgumentParser(description="Train a small encoder with a selected attention mechanism.")
    parser.add_argument(
        "--attention", default="softmax", help="Attention kind, or a JSON object with its options."
    )
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="Training steps.")
    parser.add_argument("--output", type=Path, help="Output directory. Defaults to bundles/masked-KIND.")
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
    export_and_attend(output, kind)


def read_attention(text: str) -> dict[str, object]:
    """Parse the --attention option and add defaults from `PLAIN` and `MECHANISMS`.

    Raises:
        ConfigError: If the option is invalid JSON.
    """
    options = {"kind": text}
    if text.lstrip().startswith("{"):
        try:
            options = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{text} is not JSON: {error}") from error
    return PLAIN | MECHANISMS.get(str(options.get("kind")), {}) | options


def make_config(attention: Mapping[str, object], sizes: Sizes) -> EncoderConfig:
    """Return a configuration of the `attnlens` family.

    Raises:
        ConfigError: If the attention kind or one of its options is invalid.
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
            # Pre-norm trains at this learning rate after a short warm-up; post-norm does not.
            "norm": {"placement": "pre", "eps": 1e-5},
        }
    )


def read_prose(vocab_size: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """Return a tokenizer, and the token ids of the training (90 %) and held-out prose."""
    passages = [json.loads(line)["text"] for line in PROSE.read_text(encoding="utf-8").splitlines()]
    last = len(passages) * 9 // 10
    tokenizer = train_tokenizer(passages[:last], vocab_size)
    texts = tokenizer.encode_batch(passages, add_special_tokens=False)
    train, held_out = (
        [token for text in part for token in text.ids] for part in (texts[:last], texts[last:])
    )
    return tokenizer, torch.tensor(train), torch.tensor(held_out)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a lowercase WordPiece tokenizer that adds [CLS] and [SEP]."""
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
    """Yield masked batches of random excerpts indefinitely."""
    random, length = torch.Generator().manual_seed(seed), sizes.num_tokens - 2
    while True:
        starts = torch.randint(len(ids) - length + 1, (sizes.batch_size, 1), generator=random)
        excerpts = ids[starts + torch.arange(length)]  # (B, T - 2)
        first, last = torch.full_like(starts, CLS), torch.full_like(starts, SEP)
        yield mask_tokens(torch.cat([first, excerpts, last], dim=1), sizes.vocab_size, random)


def mask_tokens(texts: Tensor, vocab_size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Select 15 % of the tokens (B, T): 80 % become [MASK], 10 % a random token, 10 % are unchanged.

    Returns:
        Input ids and labels, both (B, T). Labels are `NOT_MASKED` for tokens that were not selected.
    """
    is_masked = (torch.rand(texts.shape, generator=random) < 0.15) & (texts >= len(SPECIAL))
    action = torch.rand(texts.shape, generator=random)
    random_ids = torch.randint(len(SPECIAL), vocab_size, texts.shape, generator=random)
    input_ids = torch.where(is_masked & (action < 0.8), MASK, texts)
    input_ids = torch.where(is_masked & (action >= 0.9), random_ids, input_ids)
    return input_ids, torch.where(is_masked, texts, NOT_MASKED)


class Trainer:
    """Trains a model with AdamW, linear warm-up and decay, and gradient clipping."""

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
        """Run one optimizer step and return the loss."""
        started = time.monotonic()
        self.optimizer.zero_grad()
        with recorded_routing(self.model) as routings:
            loss: Tensor = self.model(input_ids, labels)
        # Only mixtures of heads have routers.
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
    """Train all models on the same batches, print their losses, and return them in eval mode."""
    trainers = {name: Trainer(config, sizes) for name, config in configs.items()}
    print_row("", *trainers)
    print_row(
        "weights", *(sum(p.numel() for p in trainer.model.parameters()) for trainer in trainers.values())
    )
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
    baseline = frequency_loss(train_ids, held_out_ids, sizes.vocab_size)
    print(f"Each loss is the mean since the previous row. A unigram model has a loss of {baseline:.3f}.")
    return trained


def print_row(label: str, *cells: object) -> None:
    texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"{label:>10}" + "".join(f"{text:>14}" for text in texts), flush=True)


@torch.inference_mode()
def evaluate(model: MaskedLanguageModel, sizes: Sizes, ids: Tensor) -> float:
    """Return the mean loss over 16 fixed batches."""
    batches = draw_batches(ids, sizes, seed=2)
    losses = torch.stack([model(*next(batches)) for _ in range(16)])
    return losses.mean().item()


def frequency_loss(train_ids: Tensor, held_out_ids: Tensor, vocab_size: int) -> float:
    """Return the loss of a unigram model with add-one smoothing."""
    counts = torch.bincount(train_ids, minlength=vocab_size) + 1.0
    return -(counts / counts.sum())[held_out_ids].log().mean().item()


def save(encoder: Encoder, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a checkpoint with config.json, model.safetensors and tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    content = json.dumps(encoder.config.to_hugging_face(), indent=2) + "\n"
    (directory / "config.json").write_text(content, encoding="utf-8")
    save_file(encoder.state_dict(), directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))


def export_and_attend(output: Path, kind: str) -> None:
    """Export the checkpoint, serve the bundle and run `attnlens attend`."""
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
    print(f"\nThe bundle is kept in {bundle}. Serve it with: attnlens serve {bundle}")


def run(*words: str) -> None:
    """Print and run a command."""
    print(f"\n$ attnlens {shlex.join(words)}", flush=True)
    subprocess.run([*ATTNLENS, *words], check=True)


if __name__ == "__main__":
    main()
