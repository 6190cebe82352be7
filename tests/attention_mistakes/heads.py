"""Mistakes in overlapping, mixed and composed heads.

Letters in shapes: B batch, T tokens, H heads, K head width, S shared heads.
"""

from typing import Any

import torch
from torch import Tensor

from attention_mistakes.mistake import Changed, Mistake
from attnlens_model.attention import composed
from attnlens_model.attention.composed import ComposedSelfAttention, Composition
from attnlens_model.attention.mixture import LearnedRouter, MixtureSelfAttention, TopKMask
from attnlens_model.attention.overlapping import OverlappingSelfAttention
from attnlens_model.attention.parts.masks import AttentionMask


def _wide_scale(right: Any, self: Any, *args: Any) -> Any:
    return right(Changed(self, scale=(self.head_dim + 2 * self.overlap) ** -0.5), *args)


def _shifted(right: Any, self: Any, projected: Tensor) -> Any:
    return right(self, torch.cat([projected[..., 1:], projected[..., :1]], dim=-1))


OVERLAPPING = (
    Mistake("the scale of the wider heads", OverlappingSelfAttention, "forward", _wide_scale),
    Mistake("heads shifted by a component", OverlappingSelfAttention, "overlapping_heads", _shifted),
)


def _no_factor(right: Any, self: Any, *args: Any) -> Any:
    return right(Changed(self, num_active=1), *args)


def _not_normalised(right: Any, self: Any, *args: Any) -> Any:
    routing = right(self, *args)
    total = (routing.probabilities * routing.chosen).sum(dim=-1, keepdim=True)
    shared, routed = routing.gates[..., : self.num_shared], routing.gates[..., self.num_shared :]
    return routing._replace(gates=torch.cat([shared, routed * total], dim=-1))


def _one_less(right: Any, self: Any, numbers: Tensor) -> Any:
    return right(Changed(self, count=self.count - 1), numbers)


def _no_shared_gates(right: Any, self: Any, *args: Any) -> Any:
    routing = right(self, *args)
    shared, routed = routing.gates[..., : self.num_shared], routing.gates[..., self.num_shared :]
    return routing._replace(gates=torch.cat([shared * 0.0 + 1.0, routed], dim=-1))


def _gates_without_effect(right: Any, self: Any, hidden_states: Tensor, mask: AttentionMask) -> Any:
    _, outputs = right(self, hidden_states, mask)
    query, key, value = self.project(hidden_states)
    weights = ((query * self.scale) @ key.transpose(-2, -1) + mask.bias).softmax(dim=-1)
    return self.combine(weights * mask.keep, value), outputs


MIXTURE = (
    Mistake("gates without the number of heads", LearnedRouter, "forward", _no_factor),
    Mistake("gates that are not normalised", LearnedRouter, "forward", _not_normalised),
    Mistake("one head too few", TopKMask, "forward", _one_less),
    Mistake("no gates for shared heads", LearnedRouter, "forward", _no_shared_gates),
    Mistake("gates that are returned but not used", MixtureSelfAttention, "forward", _gates_without_effect),
)


def _composed_values(right: Any, self: Any, hidden_states: Tensor, mask: AttentionMask) -> Any:
    _, outputs = right(self, hidden_states, mask)
    value = self.project(hidden_states)[2].transpose(1, 2)  # (B, T, H, K)
    value = (self.after._query_matrices(hidden_states) @ value).transpose(1, 2)
    return self.combine(outputs["attention_weights"], value), outputs


def _no_mask(_right: Any, scores: Tensor, _mask: AttentionMask) -> Tensor:
    return scores.softmax(dim=-1)


def _mask_first(right: Any, self: Any, hidden_states: Tensor, mask: AttentionMask) -> Any:
    def before(scores: Tensor, rows: Tensor) -> Any:
        return self.before(scores + mask.bias, rows)

    return right(Changed(self, before=before), hidden_states, mask._replace(bias=mask.bias * 0.0))


def _after_without_keys(right: Any, self: Any, *args: Any) -> Any:
    def after(weights: Tensor, rows: Tensor) -> Any:
        changed: Any = Changed(self.after, by_key=None)
        return Composition.forward(changed, weights, rows)

    return right(Changed(self, after=after), *args)


def _no_scale(right: Any, self: Any, *args: Any) -> Any:
    return right(Changed(self, scale=1.0), *args)


COMPOSED = (
    Mistake("values composed instead of weights", ComposedSelfAttention, "forward", _composed_values),
    Mistake("no mask after the composition", composed, "masked_softmax", _no_mask),
    Mistake("the mask before the composition", ComposedSelfAttention, "forward", _mask_first),
    Mistake("weights not composed by their keys", ComposedSelfAttention, "forward", _after_without_keys),
    Mistake("scores without scale", ComposedSelfAttention, "forward", _no_scale),
)
