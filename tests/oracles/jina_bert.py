"""Jina embeddings v2, from the formulas of the publisher's code: both kinds of it.

Günther et al. 2023, https://arxiv.org/abs/2310.19923; `jinaai/jina-bert-implementation` and, as the class
with "Code" in its name, `jinaai/jina-bert-v2-qk-post-norm`. Their code was read and is not run here: it needs
an older `transformers`.

B batch, T tokens, D width, H heads, K head width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput


class JinaBertConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "bert"

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_act: str = "gelu",
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        layer_norm_eps: float = 1e-12,
        pad_token_id: int = 0,
        position_embedding_type: str = "alibi",
        feed_forward_type: str = "original",
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.vocab_size, self.type_vocab_size = vocab_size, type_vocab_size
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.hidden_act, self.feed_forward_type = hidden_act, feed_forward_type
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.pad_token_id = pad_token_id
        self.position_embedding_type = position_embedding_type


class JinaBertCodeConfig(JinaBertConfig):  # type: ignore[no-untyped-call]
    def __init__(self, **values: Any) -> None:
        code = "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"
        super().__init__(**{"auto_map": {"AutoModel": code}} | values)


def slopes(num_heads: int) -> list[float]:
    """As the code has them, by recursion."""
    if math.log2(num_heads).is_integer():
        first = 2 ** -(2 ** -(math.log2(num_heads) - 3))
        return [first ** (head + 1) for head in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return slopes(below) + slopes(2 * below)[::2][: num_heads - below]


def module(**parts: nn.Module) -> nn.Module:
    """A module that does nothing but name its parts."""
    whole = nn.Module()
    for name, part in parts.items():
        whole.add_module(name, part)
    return whole


def norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def layer(config: Any, is_code: bool) -> nn.Module:
    width, middle = config.hidden_size, config.intermediate_size
    is_gated = config.feed_forward_type.endswith("glu")
    attention: Any = module(
        **{name: nn.Linear(width, width) for name in ("query", "key", "value")},
        **({name: norm(config) for name in ("layer_norm_q", "layer_norm_k")} if is_code else {}),
    )
    whole = module(
        attention=module(self=attention, output=module(dense=nn.Linear(width, width), LayerNorm=norm(config)))
    )
    if is_code:
        up = "up_gated_layer" if is_gated else "up_layer"
        projection = nn.Linear(width, 2 * middle if is_gated else middle, bias=False)
        whole.add_module("mlp", module(**{up: projection}, down_layer=nn.Linear(middle, width)))
        whole.add_module("layer_norm_1", norm(config))
        whole.add_module("layer_norm_2", norm(config))
    elif is_gated:
        gated = nn.Linear(width, 2 * middle, bias=False)
        mlp = module(gated_layers=gated, wo=nn.Linear(middle, width), layernorm=norm(config))
        whole.add_module("mlp", mlp)
    else:
        whole.add_module("intermediate", module(dense=nn.Linear(width, middle)))
        whole.add_module("output", module(dense=nn.Linear(middle, width), LayerNorm=norm(config)))
    return whole


class JinaBertModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class: Any = JinaBertConfig
    base_model_prefix = "bert"
    is_code = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embeddings: Any = module(
            word_embeddings=nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id),
            token_type_embeddings=nn.Embedding(config.type_vocab_size, width),
            LayerNorm=norm(config),
        )
        layers = [layer(config, self.is_code) for _ in range(config.num_hidden_layers)]
        self.encoder: Any = module(layer=nn.ModuleList(layers))
        self.pooler: Any = module(dense=nn.Linear(width, width))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_attentions: bool = True,  # noqa: ARG002 - they always come
    ) -> BaseModelOutput:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        tables = self.embeddings
        x = tables.LayerNorm(tables.word_embeddings(input_ids) + tables.token_type_embeddings(types))
        places = torch.arange(input_ids.shape[1])
        distance = (places[None, :] - places[:, None]).abs()
        by_head = torch.tensor(slopes(self.config.num_attention_heads), dtype=x.dtype)
        bias = -by_head[:, None, None] * distance  # (H, T, T)
        hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        maps = []
        for part in self.encoder.layer:
            x, weights = self.run_layer(part, x, hidden, bias)
            maps.append(weights)
        return BaseModelOutput(last_hidden_state=x, attentions=tuple(maps))

    def run_layer(self, part: Any, x: Tensor, hidden: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        own, output = part.attention.self, part.attention.output
        query, key = own.query(x), own.key(x)
        if self.is_code:
            query, key = own.layer_norm_q(query), own.layer_norm_k(key)
        query, key, value = (
            each.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
            for each in (query, key, own.value(x))
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = (scores + hidden + bias).softmax(dim=-1)
        context = (weights @ value).transpose(1, 2).flatten(-2)
        attended = output.LayerNorm(output.dense(context) + x)
        if self.is_code:
            attended = part.layer_norm_1(x + attended)
        return self.feed_forward(part, attended), weights

    def feed_forward(self, part: Any, x: Tensor) -> Any:
        kind, size = self.config.feed_forward_type, self.config.intermediate_size
        activation: Any = {"geglu": nn.GELU(), "reglu": nn.ReLU()}.get(kind)
        if self.is_code and activation is None:
            return part.layer_norm_2(x + part.mlp.down_layer(self.act(part.mlp.up_layer(x))))
        if self.is_code:
            both = part.mlp.up_gated_layer(x)
            middle = both[..., :size] * activation(both[..., size:])
            return part.layer_norm_2(x + part.mlp.down_layer(middle))
        if activation is None:
            return part.output.LayerNorm(part.output.dense(self.act(part.intermediate.dense(x))) + x)
        both = part.mlp.gated_layers(x)
        middle = activation(both[..., :size]) * both[..., size:]
        return part.mlp.layernorm(part.mlp.wo(middle) + x)

    def act(self, x: Tensor) -> Any:
        return ACT2FN[self.config.hidden_act](x)


class JinaBertCodeModel(JinaBertModel):  # type: ignore[no-untyped-call]
    config_class = JinaBertCodeConfig
    is_code = True
