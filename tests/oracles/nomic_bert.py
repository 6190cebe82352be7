"""Nomic-embed-text v2, from the formulas of the publisher's code: experts in every n-th layer.

Nussbaum & Duderstadt 2025, https://arxiv.org/abs/2502.07972. The code was read in public copies and is not
run here; `transformers` 5 has NomicBERT without experts. Here each expert runs on the tokens that chose it.

B batch, T tokens, D width, H heads, K head width, N = B * T.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from oracles.jina_bert import module

# Ours, as tests name sizes -> theirs.
_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


class NomicBertConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "nomic_bert"

    def __init__(self, vocab_size: int = 300, pad_token_id: int = 1, **values: Any) -> None:
        defaults = {
            "activation_function": "gelu",
            "rotary_emb_fraction": 1.0,
            "rotary_emb_base": 10000.0,
            "rotary_emb_interleaved": False,
            "layer_norm_epsilon": 1e-5,
            "type_vocab_size": 1,
            "qkv_proj_bias": True,
            "mlp_fc1_bias": True,
            "mlp_fc2_bias": True,
            "moe_every_n_layers": 2,
            "num_experts": 5,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": False,
            "expert_choice_router": False,
            "num_shared_experts": 0,
            "ffn_div": 1,
        }
        sizes = {theirs: values.get(theirs, values.get(ours)) for ours, theirs in _KEYS.items()}
        own = {key: values.pop(key, default) for key, default in defaults.items()}
        super().__init__(**{key: value for key, value in values.items() if key not in _KEYS})
        for key, value in (own | sizes).items():
            setattr(self, key, value)
        self.vocab_size, self.pad_token_id = vocab_size, pad_token_id


class NomicBertModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class: Any = NomicBertConfig
    base_model_prefix = "nomic_bert"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.n_embd
        tables = {"word_embeddings": nn.Embedding(config.vocab_size, width)}
        if config.type_vocab_size:
            tables["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, width)
        self.embeddings: Any = module(**tables)
        self.emb_ln = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        layers = [self.layer(number) for number in range(config.n_layer)]
        self.encoder: Any = module(layers=nn.ModuleList(layers))
        self.post_init()  # type: ignore[no-untyped-call]

    def layer(self, number: int) -> nn.Module:
        config, width, middle = self.config, self.config.n_embd, self.config.n_inner
        mlp = module(
            fc1=nn.Linear(width, middle, bias=config.mlp_fc1_bias),
            fc2=nn.Linear(middle, width, bias=config.mlp_fc2_bias),
        )
        if config.moe_every_n_layers and number % config.moe_every_n_layers == 1:
            experts, pair = nn.Module(), nn.Module()
            for name in ("w1", "w2"):
                pair.register_parameter(name, nn.Parameter(torch.zeros(config.num_experts * middle, width)))
            experts.add_module("mlp", pair)
            experts.register_parameter("bias", nn.Parameter(torch.zeros(width)))
            router = module(layer=nn.Linear(width, config.num_experts, bias=False))
            mlp = module(router=router, experts=experts)
        bias = config.qkv_proj_bias
        attention = module(
            Wqkv=nn.Linear(width, 3 * width, bias=bias), out_proj=nn.Linear(width, width, bias=bias)
        )
        norms = {name: nn.LayerNorm(width, eps=config.layer_norm_epsilon) for name in ("norm1", "norm2")}
        return module(attn=attention, mlp=mlp, **norms)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_attentions: bool = True,  # noqa: ARG002 - they always come
    ) -> BaseModelOutput:
        x = self.embeddings.word_embeddings(input_ids)
        if self.config.type_vocab_size:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + self.embeddings.token_type_embeddings(types)
        x = self.emb_ln(x)
        hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        maps = []
        for part in self.encoder.layers:
            attended, weights = self.attend(part.attn, x, hidden)
            x = part.norm1(attended + x)
            x = part.norm2(self.feed_forward(part.mlp, x) + x)
            maps.append(weights)
        return BaseModelOutput(last_hidden_state=x, attentions=tuple(maps))

    def attend(self, part: Any, x: Tensor, hidden: Tensor) -> tuple[Any, Tensor]:
        shape = (3, self.config.n_head, self.config.n_embd // self.config.n_head)
        query, key, value = part.Wqkv(x).unflatten(-1, shape).permute(2, 0, 3, 1, 4)  # (B, H, T, K) each
        query, key = self.rotated(query), self.rotated(key)
        weights = (query @ key.transpose(-1, -2) / math.sqrt(shape[-1]) + hidden).softmax(dim=-1)
        return part.out_proj((weights @ value).transpose(1, 2).flatten(-2)), weights

    def rotated(self, x: Tensor) -> Tensor:
        """As complex numbers, of which component i and i + K / 2 are the two parts."""
        half = x.shape[-1] // 2
        frequencies = self.config.rotary_emb_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def feed_forward(self, part: Any, x: Tensor) -> Any:
        activation = nn.functional.gelu
        if not hasattr(part, "router"):
            return part.fc2(activation(part.fc1(x)))
        tokens = x.flatten(0, 1)  # (N, D)
        weights, chosen = part.router.layer(tokens).softmax(dim=-1).topk(self.config.moe_top_k)
        pair = part.experts.mlp
        ups, downs = (each.unflatten(0, (self.config.num_experts, -1)) for each in (pair.w1, pair.w2))
        total = torch.zeros_like(tokens)
        for number in range(self.config.num_experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            output = activation(tokens[rows] @ ups[number].T) @ downs[number]
            total.index_add_(0, rows, output * weights[rows, places, None])
        return total.view_as(x) + part.experts.bias
