"""Encoders written in different styles, for `export_module`.

B batch, T tokens, D hidden size, H heads, K head size.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, MAX_TOKENS = 50, 16, 4, 2, 20
Result = tuple[Tensor, list[Tensor]]


class Base(nn.Module):
    """Token and position embeddings, and a head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.positions = nn.Embedding(MAX_TOKENS, HIDDEN_SIZE)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN_SIZE) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

    def embed(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        return result


class WithMultiheadAttention(Base):
    """`nn.MultiheadAttention` with a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS, dropout=0.1, batch_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN_SIZE, 32), nn.GELU(), nn.Linear(32, HIDDEN_SIZE))
            for _ in range(NUM_LAYERS)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:
        states, all_weights = self.embed(input_ids), []
        for attention, network, norm in zip(self.attentions, self.networks, self.norms, strict=True):
            normed = norm(states)
            output, weights = attention(
                normed, normed, normed, key_padding_mask=attention_mask == 0, average_attn_weights=False
            )
            states = states + output
            states = states + network(norm(states))
            all_weights.append(weights)
        return states, all_weights


class WithBiasPerHead(WithMultiheadAttention):
    """ALiBi and padding in one mask per text and head, (B * H, T, T)."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:
        index = torch.arange(input_ids.shape[1])
        slopes = 2.0 ** -torch.arange(1.0, 1 + NUM_HEADS)
        bias = -slopes[:, None, None] * (index[:, None] - index).abs()  # (H, T, T)
        mask = bias.expand(input_ids.shape[0], -1, -1, -1)
        mask = mask.masked_fill(attention_mask[:, None, None] == 0, -math.inf).flatten(0, 1)
        states, all_weights = self.tokens(input_ids), []
        for attention in self.attentions:
            output, weights = attention(states, states, states, attn_mask=mask, average_attn_weights=False)
            states = states + output
            all_weights.append(weights)
        return states, all_weights


class WithTransformerEncoder(Base):
    """`nn.TransformerEncoder` with its default layout, (T, B, D), and a causal mask, but no weights."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN_SIZE, NUM_HEADS, dim_feedforward=32)
        self.encoder = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.register_buffer("mask", torch.ones(MAX_TOKENS, MAX_TOKENS, dtype=torch.bool).triu(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        num_tokens = input_ids.shape[1]
        states = self.embed(input_ids).transpose(0, 1)
        mask = self.mask[:num_tokens, :num_tokens]
        result: Tensor = self.encoder(states, mask=mask, src_key_padding_mask=attention_mask == 0)
        return result.transpose(0, 1)


class WithTwoCallsOfAttention(WithTransformerEncoder):
    """The same, and the weights from a second call, whose other results are not used."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:  # type: ignore[override]
        all_weights = []

        def keep(module: nn.MultiheadAttention, args: Any, kwargs: dict[str, Any]) -> None:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            _, weights = nn.MultiheadAttention.forward(module, *args, **kwargs)
            assert weights is not None
            all_weights.append(weights)

        layers = self.encoder.layers
        hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
        states = super().forward(input_ids, attention_mask)
        for hook in hooks:
            hook.remove()
        return states, all_weights


class Projected(Base):
    """One projection for queries, keys and values."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE) for _ in range(NUM_LAYERS))
        self.outputs = nn.ModuleList(nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(NUM_LAYERS))
        mask = torch.ones(MAX_TOKENS, MAX_TOKENS).tril()
        self.register_buffer("mask", mask.view(1, 1, MAX_TOKENS, MAX_TOKENS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:
        states, all_weights = self.embed(input_ids), []
        for projection, output, norm in zip(self.projections, self.outputs, self.norms, strict=True):
            heads, weights = self.attend(projection(norm(states)), attention_mask)
            states = states + output(heads)
            all_weights.append(weights)
        return states, all_weights

    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map projections (B, T, 3D) to concatenated heads (B, T, D) and weights (B, H, T, T)."""
        raise NotImplementedError


class WithEinsum(Projected):
    """Products by `einsum`, and the smallest number as the mask."""

    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, num_tokens, _ = projected.shape
        query, key, value = projected.view(batch_size, num_tokens, 3, NUM_HEADS, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        mask = attention_mask[:, None, None, :] == 0
        weights = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
        heads = torch.einsum("bhqk,bkhd->bqhd", weights, value)
        return heads.reshape(batch_size, num_tokens, HIDDEN_SIZE), weights


class WithOwnNorms(WithEinsum):
    """Norms written by hand, and `nn.RMSNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([OwnNorm(), nn.RMSNorm(HIDDEN_SIZE)])


class OwnNorm(nn.Module):
    """Layer norm with the mean and the standard deviation."""

    def forward(self, states: Tensor) -> Tensor:
        mean, deviation = states.mean(-1, keepdim=True), states.std(-1, keepdim=True)
        return (states - mean) / (deviation + 1e-6)


class WithCausalBuffer(Projected):
    """A causal mask in a buffer, as in decoders for generation. Padding is not masked."""

    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        del attention_mask
        batch_size, num_tokens, _ = projected.shape
        query, key, value = (
            part.view(batch_size, num_tokens, NUM_HEADS, -1).transpose(1, 2)
            for part in projected.split(HIDDEN_SIZE, dim=2)  # type: ignore[no-untyped-call]
        )
        scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :num_tokens, :num_tokens] == 0, float("-inf"))
        weights = scores.softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous().view_as(projected[..., :HIDDEN_SIZE]), weights


class WithFusedAttention(Projected):
    """`scaled_dot_product_attention`, and the weights computed a second time."""

    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (
            part.view(*part.shape[:2], NUM_HEADS, -1).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        mask = attention_mask[:, None, None, :].bool()
        heads = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        weights = (scores + (1 - mask.float()) * -1e9).softmax(dim=-1)
        return heads.transpose(1, 2).flatten(2), weights


class WithGroups(Base):
    """Groups of heads that share keys and values, `einsum` with parameters, and squares of ReLU."""

    def __init__(self) -> None:
        super().__init__()
        head_size, num_groups = HIDDEN_SIZE // NUM_HEADS, NUM_HEADS // 2

        def weights(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(NUM_LAYERS))

        self.queries = weights(HIDDEN_SIZE, NUM_HEADS, head_size)
        self.shared = weights(2, HIDDEN_SIZE, num_groups, head_size)
        self.outputs = weights(NUM_HEADS, head_size, HIDDEN_SIZE)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:
        states, all_weights = self.embed(input_ids), []
        for layer, norm in enumerate(self.norms):
            normed = norm(states)
            query = torch.einsum("btd,dhk->bhtk", normed, self.queries[layer])
            key, value = torch.einsum("btd,cdgk->cbgtk", normed, self.shared[layer])
            heads, weights = self.attend(query, key, value, attention_mask[:, None, None, :] == 0)
            states = states + torch.einsum("bhtk,hkd->btd", heads, self.outputs[layer])
            states = states + functional.relu(norm(states)).square()
            all_weights.append(weights)
        return states, all_weights

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries (B, H, T, K), keys and values (B, G, T, K) to heads (B, H, T, K) and their weights."""
        in_groups = query.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
        scores = torch.einsum("bgnqk,bgtk->bgnqt", in_groups, key).flatten(1, 2)
        weights = scores.masked_fill(padding, -math.inf).softmax(dim=-1)
        of_groups = weights.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
        return torch.einsum("bgnqt,bgtk->bgnqk", of_groups, value).flatten(1, 2), weights


class WithRepeatedGroups(WithGroups):
    """The same, with keys and values repeated for each head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        weights = (query @ key.mT).masked_fill(padding, -math.inf).softmax(dim=-1)
        return weights @ value, weights


class WithPaddingLeak(WithEinsum):
    """The mask is not used."""

    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().attend(projected, torch.ones_like(attention_mask))


def create(kind: type[nn.Module]) -> nn.Module:
    """Return a module in eval mode with weights that are large enough to show mistakes."""
    torch.manual_seed(0)
    module = kind().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module
