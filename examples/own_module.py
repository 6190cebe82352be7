"""An encoder written by hand: trained, exported, served in this process, and explained.

    python examples/own_module.py

`HandWritten` only uses PyTorch. It returns hidden states and the attention weights of each layer, which is
all that `export_module` requires. The bundle is only created if its graphs agree with the module, also with
padding.

Dimensions: B batch, T tokens, D hidden size, H heads, K head size.
"""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import attnlens_server
from attnlens_export import ExportOptions, export_module

MAX_TOKENS = 32
WEATHER = ["the rain falls on the hills", "snow covers the hills in winter", "the wind brings rain and snow"]
FOOD = ["the soup needs salt and pepper", "bread tastes good with soup", "pepper and salt are on the table"]


class HandWritten(nn.Module):
    """Two layers of self-attention with residual connections."""

    def __init__(self, vocab_size: int, hidden_size: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(MAX_TOKENS, hidden_size)
        self.projections = nn.ModuleList(nn.Linear(hidden_size, 3 * hidden_size) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(2))
        self.classifier = nn.Linear(hidden_size, 2)  # only for training

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Map token ids (B, T) to hidden states (B, T, D) and the weights of each layer (B, H, T, T)."""
        states = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        all_weights = []
        for projection, output in zip(self.projections, self.outputs, strict=True):
            query, key, value = (
                part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, K)
                for part in projection(states).chunk(3, dim=-1)
            )
            scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5
            scores = scores.masked_fill(attention_mask[:, None, None] == 0, -torch.inf)
            weights = scores.softmax(dim=-1)
            states = states + output((weights @ value).transpose(1, 2).flatten(-2))
            all_weights.append(weights)
        return states, all_weights


def train(module: HandWritten, tokenizer: Tokenizer) -> None:
    """Train the module to tell weather from food."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batch = tokenizer.encode_batch(WEATHER + FOOD)
    input_ids = torch.tensor([text.ids for text in batch])
    mask = torch.tensor([text.attention_mask for text in batch])
    labels = torch.tensor([0] * len(WEATHER) + [1] * len(FOOD))
    for _step in range(30):
        states, _weights = module(input_ids, mask)
        pooled = (states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        loss = nn.functional.cross_entropy(module.classifier(pooled), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Create a tokenizer, train the module, export it, and explain a text."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        WEATHER + FOOD, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"])
    )
    tokenizer.enable_padding()
    torch.manual_seed(0)
    vocab_size = tokenizer.get_vocab_size()
    module = HandWritten(vocab_size)
    train(module, tokenizer)

    with tempfile.TemporaryDirectory() as folder:
        bundle, tokenizer_file = Path(folder) / "bundle", Path(folder) / "tokenizer.json"
        tokenizer.save(str(tokenizer_file))
        options = ExportOptions(tokenizer=tokenizer_file, normalize=True)
        export_module(module.eval(), bundle, vocab_size=vocab_size, max_tokens=MAX_TOKENS, options=options)
        with attnlens_server.local(bundle) as model:
            text = "the snow falls on the table"
            [explanation] = model.explain([text], to=WEATHER[1], rather_than=FOOD[1])
    print(f"Why {text!r} is closer to {WEATHER[1]!r} than to {FOOD[1]!r}:")
    for token, score in explanation.top(4):
        print(f"{score:8.3f}  {token}")


if __name__ == "__main__":
    main()
