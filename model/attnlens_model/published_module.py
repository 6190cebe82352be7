"""`PublishedModule`: an encoder of transformers, in the form that `ModuleEncoder` takes.

The module computes everything itself, except attention masks: transformers builds boolean masks and adds the
smallest fp32 number, which few runtimes support. `PublishedModule` asks each mask function of the model which
keys a query may attend to, and builds the same mask in the form of `attention.parts.masks`.

B batch, T tokens, D hidden size, H heads.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.parts.masks import prepare_mask
from attnlens_model.errors import ConfigError

_TRIAL_LENGTH = 8
_NUM_SAMPLES = 4096
_NUM_NEIGHBORS = 256
_MAX_ERROR = 1e-5
_MAX_FLOPS = 2 * 10**11


class Reach(NamedTuple):
    """Maximum distance of a key before and after its query, in tokens. None if it is unlimited."""

    before: int | None
    after: int | None


class PublishedModule(nn.Module):
    """An encoder of transformers that takes token ids, a mask and token types.

    Args:
        model: The encoder, in eval mode, with eager attention.
        max_tokens: Maximum input length in tokens.

    Attributes:
        reaches: Reach of each mask that one run builds, in order.
        windows: Window of each layer, in tokens. None if it is unlimited.
        num_heads: Number of heads of each layer.
        output_size: Size of the hidden states.
        is_causal: Whether all layers are causal.

    Raises:
        ConfigError: The model returns no attention weights, or a mask that depends on more than the distance
            of query and key.
    """

    positions: Tensor

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        # torch.arange would become Range, with a computed length.
        self.register_buffer("positions", torch.arange(max_tokens), persistent=False)
        self.reaches: list[Reach] = []
        self.num_heads: list[int] = []
        self.output_size = 0
        used, is_triangular = self._try(max_tokens)
        found = [Reach(None, None) if index is None else self.reaches[index] for index in used]
        self.is_causal = is_triangular or all(reach.after == 0 for reach in found)
        self.windows = [_window(reach, self.is_causal) for reach in found]

    def _try(self, max_tokens: int) -> tuple[list[int | None], bool]:
        """Find the reaches. Each mask of the trial excludes another key, which shows which layers use it.

        Returns:
            The index of the reach of each layer, or None without a mask, and whether queries ignore later
            keys without one.
        """
        length = min(_TRIAL_LENGTH, max_tokens)
        ids = torch.zeros((1, length), dtype=torch.int64)

        def marking_mask(**options: Any) -> Tensor:  # noqa: ANN401 - arguments of transformers
            self.reaches.append(_find_reach(options, max_tokens))
            mask = torch.zeros(1, 1, length, length)
            mask[..., (len(self.reaches) - 1) % length] = -1e4
            return mask

        with torch.no_grad(), mask_function(marking_mask):
            output = self._run(ids, torch.ones_like(ids), None)
        if self.takes_types:
            with torch.no_grad():
                of_type_0, by_default = (
                    self._run(ids, torch.ones_like(ids), types).last_hidden_state
                    for types in (torch.zeros_like(ids), None)
                )
            # Some models add the embedding of a token instead. Their types are left out.
            self.takes_types = not bool((of_type_0 != by_default).any())
        weights = getattr(output, "attentions", None)
        if not weights or any(each is None or each.ndim != 4 for each in weights):  # noqa: PLR2004 - (B, H, T, T)
            raise ConfigError("it returns no attention weights")
        if len(self.reaches) > length:
            raise ConfigError(f"it builds {len(self.reaches)} masks: at most {length} can be told apart")
        self.num_heads = [each.shape[1] for each in weights]
        self.output_size = output.last_hidden_state.shape[-1]
        is_triangular = not any(bool(each.triu(1).any()) for each in weights)
        excluded = [(each[0].sum((0, 1)) == 0).nonzero().flatten().tolist() for each in weights]
        used = [next(iter(columns), None) if self.reaches else None for columns in excluded]
        return used, is_triangular

    def verify(self, vocab_size: int) -> None:
        """Compare with the model itself: at the edges of windows, with padding on both sides, and alone.

        Raises:
            ConfigError: The results differ.
        """
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        edges = {limit + step for reach in self.reaches for limit in reach if limit for step in (0, 1, 2)}
        limit = min(len(self.positions), max(2, _MAX_FLOPS // (6 * num_parameters)))
        generator = torch.Generator().manual_seed(0)
        for length in sorted({1, 2} | {edge for edge in edges if edge < limit}):
            total = min(length + 3, len(self.positions))
            ids = torch.randint(vocab_size, (3, total), generator=generator)
            mask = torch.ones_like(ids)
            mask[1, length:] = 0
            mask[2, : total - length] = 0
            alone = ids[1:2, :length], mask[1:2, :length]
            with torch.no_grad():
                found = self(ids, mask)[0]
                expected = self._run(ids, mask, None).last_hidden_state
                expected_alone = self._run(*alone, None).last_hidden_state
            live = mask == 1
            error = max(
                float((found - expected)[live].abs().max()),
                float((found[1:2, :length] - expected_alone).abs().max()),
            )
            # NaN is no difference: tensors that a checkpoint lacks are NaN.
            if error > _MAX_ERROR * max(1.0, float(expected[live].abs().max())):
                raise ConfigError(
                    f"its results differ by {error:.1e} between a text of {length} tokens in a batch and "
                    "alone, or with a portable attention mask"
                )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states (B, T, D) and the attention weights of each layer (B, H, T, T).

        Weights of padding are 0.
        """
        masks: dict[Reach, Tensor] = {}
        reaches = iter(self.reaches)

        def portable_mask(*, dtype: torch.dtype, **_options: object) -> Tensor:
            reach = next(reaches)
            if reach not in masks:
                masks[reach] = prepare_mask(self._keep(reach, attention_mask), dtype).bias
            return masks[reach]

        with mask_function(portable_mask):
            output = self._run(input_ids, attention_mask, token_type_ids)
        hidden_states: Tensor = output.last_hidden_state
        is_token = attention_mask.to(hidden_states.dtype)[:, None, :, None]
        return hidden_states, [weights * is_token for weights in output.attentions]

    def _run(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Any:  # noqa: ANN401
        types = {"token_type_ids": token_type_ids} if self.takes_types else {}
        return self.model(input_ids, attention_mask=attention_mask, output_attentions=True, **types)

    def _keep(self, reach: Reach, attention_mask: Tensor) -> Tensor:
        """Return the keep mask, (B, 1, 1, T) or (B, 1, T, T)."""
        keep = attention_mask.to(torch.float32)[:, None, None, :]
        if reach == (None, None):
            return keep
        exact = self.positions[: attention_mask.shape[1]].to(torch.float32)
        distance = exact[:, None] - exact[None, :]  # of the query after the key
        for limit, own in ((reach.before, distance), (reach.after, -distance)):
            if limit is not None:
                keep = keep * (limit + 1.0 - own).clamp(0.0, 1.0)
        return keep


def _window(reach: Reach, is_causal: bool) -> int | None:
    sides = (reach.before, 0 if is_causal else reach.after)
    return None if None in sides else max(side for side in sides if side is not None)


@contextmanager
def mask_function(function: Callable[..., Tensor]) -> Iterator[None]:
    """Let transformers call a function for the masks of eager attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415

    functions: Any = ALL_MASK_ATTENTION_FUNCTIONS
    functions["eager"] = function
    try:
        yield
    finally:
        del functions["eager"]


def _find_reach(options: Mapping[str, Any], max_tokens: int) -> Reach:
    """Return the reach of the mask function that transformers passes.

    Raises:
        ConfigError: The mask depends on more than the distance of query and key.
    """
    zero, last = torch.zeros((), dtype=torch.int64), max_tokens - 1

    def allowed(queries: Tensor, keys: Tensor) -> Tensor:
        result = torch.as_tensor(options["mask_function"](zero, zero, queries, keys))
        return result.expand((queries - keys).shape)

    every = torch.arange(max_tokens)
    before = int(allowed(every[-1], every).sum()) - 1
    after = int(allowed(every[0], every).sum()) - 1
    samples = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (_NUM_SAMPLES,), generator=samples)

    queries = draw(0, max_tokens)
    near = (queries + draw(-2 * before - 2, 2 * before + 3)).clamp(0, last)
    grid = every[:_NUM_NEIGHBORS]
    pairs = ((queries, draw(0, max_tokens)), (queries, near), (grid[:, None], grid[None, :]))
    for rows, columns in pairs:
        expected = (rows - columns <= before) & (columns - rows <= after)
        if not torch.equal(allowed(rows, columns), expected):
            raise ConfigError("its attention mask depends on more than the distance of query and key")
    return Reach(None if before == last else before, None if after == last else after)
