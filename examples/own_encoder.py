"""An encoder written with nn.TransformerEncoder: trained, exported, served in this process, and explained.

    python examples/own_encoder.py
    python examples/own_encoder.py --steps 1000 --output bundles/my-encoder

The encoder is trained with masked language modeling for about a minute, on the same prose as in
train_masked.py. Only the end of `main` is specific to attnlens: it saves a checkpoint, and exports and
explains it.

Dimensions: B batch, T tokens, D hidden size, V vocabulary.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_masked import (  # type: ignore[import-not-found]
    NOT_MASKED,
    SENTENCE,
    Sizes,
    draw_batches,
    read_prose,
)

import attnlens_server

ARCHITECTURE: dict[str, Any] = {
    "d_model": 128,
    "nhead": 4,
    "dim_feedforward": 512,
    "activation": "gelu",
    "norm_first": True,
}
NUM_LAYERS = 4


class OwnEncoder(nn.Module):
    """Token and position embeddings, followed by `nn.TransformerEncoder`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.positions = nn.Embedding(sizes.num_tokens, sizes.hidden_size)
        layer = nn.TransformerEncoderLayer(**ARCHITECTURE, dropout=0.0, batch_first=True)
        norm = nn.LayerNorm(sizes.hidden_size)
        self.encoder = nn.TransformerEncoder(layer, NUM_LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids (B, T) to scores (B, T, V)."""
        positions = torch.arange(input_ids.shape[1])
        scores: Tensor = self.head(self.encoder(self.embedding(input_ids) + self.positions(positions)))
        return scores


def train(encoder: OwnEncoder, sizes: Sizes, token_ids: Tensor) -> None:
    """Train with masked language modeling, and print the loss."""
    optimizer = torch.optim.AdamW(encoder.parameters(), sizes.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, sizes.learning_rate, total_steps=sizes.steps)
    batches, every = draw_batches(token_ids, sizes, seed=1), max(1, sizes.steps // 5)
    for step in range(1, sizes.steps + 1):
        input_ids, labels = next(batches)
        scores = encoder(input_ids)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=NOT_MASKED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step == 1 or step % every == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)


def main() -> None:
    """Train an encoder, export it, and explain a sentence."""
    parser = argparse.ArgumentParser(description="Train, export and explain an encoder in plain PyTorch.")
    parser.add_argument("--steps", type=int, default=400, help="Training steps.")
    parser.add_argument("--output", type=Path, default=Path("bundles/own"), help="Output directory.")
    args = parser.parse_args()
    sizes = Sizes(steps=args.steps)
    tokenizer, train_ids, _held_out = read_prose(sizes.vocab_size)
    torch.manual_seed(0)
    encoder = OwnEncoder(sizes)
    train(encoder, sizes, train_ids)

    # 1. Save a checkpoint: weights, tokenizer, and the arguments of the layers.
    checkpoint, bundle = args.output / "checkpoint", args.output / "bundle"
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(encoder.state_dict(), checkpoint / "pytorch_model.bin")
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    config = {
        "model_type": "torch_encoder",
        **ARCHITECTURE,
        "num_layers": NUM_LAYERS,
        "final_norm": True,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.num_tokens,
    }
    (checkpoint / "config.json").write_text(json.dumps(config))

    # 2. Export it. The bundle is only created if its graphs agree with PyTorch.
    command = [sys.executable, "-m", "attnlens_cli.main", "export", str(checkpoint), "--output", str(bundle)]
    subprocess.run([*command, "--pooling", "mean", "--normalize", "--force"], check=True)

    # 3. Explain a sentence.
    with attnlens_server.local(bundle) as model:
        [explanation] = model.explain([SENTENCE])
        [encoded] = model.encode([SENTENCE], attention=[])
    print(f"{len(encoded.tokens)} tokens; the largest contributions to the embedding:")
    for token, score in explanation.top(5):
        print(f"{score:8.3f}  {token}")


if __name__ == "__main__":
    main()
