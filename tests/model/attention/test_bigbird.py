"""BigBird attention against a dense NumPy reference, with all kinds of padding."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from attnlens_model import ATTENTION_WEIGHTS, ConfigError
from attnlens_model.attention.bigbird import BigBirdAttentionConfig, BigBirdSelfAttention
from attnlens_model.attention.mechanism import BatchInputs, EncoderSizes
from attnlens_model.attention.parts.random_blocks import draw_random_blocks

Array = npt.NDArray[np.float64]

WIDTH, HEADS = 12, 3
# Block size, random blocks, maximum length, kind of random blocks. The last block of the maximum length is
# incomplete in most cases.
KINDS = [
    (4, 1, 62, "original"),
    (4, 1, 62, "first_block"),
    (4, 2, 79, "original"),
    (3, 2, 60, "first_block"),
    (2, 1, 31, "original"),
]


class Layer:
    """A layer and its shared module in float64."""

    def __init__(self, size: int, num_random: int, longest: int, random_blocks: str) -> None:
        self.size, self.num_random, self.longest = size, num_random, longest
        self.config = BigBirdAttentionConfig(
            num_heads=HEADS,
            block_size=size,
            num_random_blocks=num_random,
            random_blocks=random_blocks,  # type: ignore[arg-type] # parametrized
            seed=3,
            table_tokens=longest,
        )
        sizes = EncoderSizes(WIDTH, longest, is_causal=False, hidden_dropout=0.0, layer_norm_eps=1e-12)
        torch.manual_seed(0)
        module = self.config.make_layer(sizes).double().eval()
        assert isinstance(module, BigBirdSelfAttention)
        self.module, self.shared = module, self.config.make_shared(sizes).double()

    @property
    def num_full(self) -> int:
        """The maximum length of full attention."""
        return (5 + 2 * self.num_random) * self.size

    def lengths(self) -> Iterator[int]:
        full, size = self.num_full, self.size
        yield from (1, 2, size, size + 1, full - 1, full, full + 1, full + size, full + size + 1)
        yield from (self.longest - 1, self.longest)

    def run(self, hidden: Tensor, mask: Tensor) -> tuple[Array, Array]:
        """Return the context and the weights in block layout."""
        with torch.no_grad():
            (inputs,) = self.shared(BatchInputs(mask, mask.double()[:, None, None]))
            context, outputs = self.module(hidden, inputs)
        return context.numpy(), outputs[ATTENTION_WEIGHTS].numpy()

    def expected(self, hidden: Tensor, mask: Tensor) -> tuple[Array, Array]:
        """Return the context and the dense weights (H, T, T) for one text (T, D), by definition."""
        with torch.no_grad():
            query, key, value = (
                projection(hidden).unflatten(-1, (HEADS, -1)).transpose(0, 1).numpy()
                for projection in (self.module.query, self.module.key, self.module.value)
            )
            weights = self._dense(query, key, mask.numpy())
            heads = torch.from_numpy(weights @ value).transpose(0, 1).flatten(-2)
            return self.module.output(heads).numpy(), weights

    def _dense(self, query: Array, key: Array, mask: npt.NDArray[np.int64]) -> Array:
        weights = np.zeros((HEADS, len(mask), len(mask)))
        live = np.flatnonzero(mask)
        for head in range(HEADS) if len(live) else ():
            times = self._times(head, live[-1] // self.size + 1)
            for token in live:
                counts = np.array([times[token // self.size, other // self.size] for other in live])
                scores = key[head, live[counts > 0]] @ query[head, token] / np.sqrt(WIDTH / HEADS)
                exponentials = counts[counts > 0] * np.exp(scores - scores.max())
                weights[head, token, live[counts > 0]] = exponentials / exponentials.sum()
        return weights

    def _times(self, head: int, count: int) -> npt.NDArray[np.int64]:
        """Return how often each block attends to each other one in a text of `count` blocks."""
        times = np.ones((count, count), dtype=np.int64)
        if count <= 5 + 2 * self.num_random:
            return times
        for block in range(1, count - 1):
            attended = {0, count - 1, block - 1, block, block + 1}
            times[block] = [other in attended for other in range(count)]
            for other in self.config.table.random_blocks[head, block - 1]:
                if 0 <= other < count:
                    times[block, other] += 1
        return times


@pytest.fixture(params=KINDS, ids=str)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(*request.param)


def draw(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return 3 * torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)


def test_weights_and_context_match_a_dense_reference_for_any_padding(layer: Layer) -> None:
    for length in layer.lengths():
        hidden, mask = draw(6, length), torch.ones(6, length, dtype=torch.int64)
        mask[1, max(1, length // 2) :] = 0
        mask[2, layer.num_full :] = 0
        mask[3] = 0
        mask[4, max(1, length // 3) : length // 3 + layer.size + 2] = 0
        mask[5, : length // 3] = 0
        contexts, rows = layer.run(hidden, mask)
        assert rows.shape == (6, HEADS, length, layer.config.table.width)
        assert (rows[3] == 0).all()
        for text in (0, 1, 2, 4, 5):
            live = np.flatnonzero(mask[text])
            context, weights = layer.expected(hidden[text], mask[text])
            np.testing.assert_allclose(contexts[text][live], context[live], rtol=0, atol=1e-12)
            end = live[-1] + 1
            dense = layer.config.table.at(end).dense(rows[text, :, :end])
            np.testing.assert_allclose(dense, weights[:, :end, :end], rtol=0, atol=1e-12)
            np.testing.assert_allclose(dense[:, live].sum(axis=-1), 1, rtol=0, atol=1e-12)
            dead = np.flatnonzero(mask[text] == 0)
            assert (dense[..., dead[dead < end]] == 0).all()
            assert (rows[text, :, dead] == 0).all()


def test_result_is_independent_of_batch_and_right_padding(layer: Layer) -> None:
    longest, full = layer.longest, layer.num_full
    hidden = draw(4, longest)
    lengths = [longest, full, full + 1, 1]
    mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    contexts, rows = layer.run(hidden, mask)
    for text, length in enumerate(lengths):
        context, alone = layer.run(hidden[text : text + 1, :length], mask[text : text + 1, :length])
        np.testing.assert_allclose(contexts[text, :length], context[0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(rows[text, :, :length], alone[0], rtol=0, atol=1e-13)


def test_short_text_does_not_affect_a_later_long_one(layer: Layer) -> None:
    hidden, mask = draw(1, layer.longest), torch.ones(1, layer.longest, dtype=torch.int64)
    before = layer.run(hidden, mask)
    layer.run(hidden[:, : layer.num_full], mask[:, : layer.num_full])
    for first, second in zip(before, layer.run(hidden, mask), strict=True):
        np.testing.assert_array_equal(first, second)


def test_edges_are_the_block_size_and_the_lengths_around_full_attention() -> None:
    layer = Layer(4, 2, 79, "original")
    assert layer.config.edges == (4, layer.num_full, layer.num_full + 4) == (4, 36, 40)


def test_every_table_lists_some_block_more_than_once() -> None:
    """Otherwise, the tests above would not check that repeated blocks are counted repeatedly."""
    for kind in KINDS:
        layer = Layer(*kind)
        times = np.stack([layer._times(head, layer.longest // layer.size) for head in range(HEADS)])
        assert times.max() > 1


def test_fp16_results_are_finite_for_any_mask() -> None:
    layer = Layer(4, 1, 62, "original")
    module, shared = layer.module.half(), layer.shared.half()
    mask = torch.ones(3, 62, dtype=torch.int64)
    mask[1] = 0
    mask[2, 20:] = 0
    (inputs,) = shared(BatchInputs(mask, mask.half()[:, None, None]))
    context, outputs = module(draw(3, 62).half(), inputs)
    assert context.isfinite().all()
    rows = outputs[ATTENTION_WEIGHTS]
    assert rows.dtype == torch.float16
    assert rows.isfinite().all()
    assert (rows[1] == 0).all()


def test_random_blocks_are_reproducible() -> None:
    tables = [draw_random_blocks(12, 4096, 64, 3, seed) for seed in (0, 11)]
    assert [table.shape for table in tables] == [(12, 62, 3)] * 2
    digests = [hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()[:16] for table in tables]
    assert digests == ["c46970d98425a1ce", "fd5862370db994a1"]


def test_missing_random_blocks_are_minus_one() -> None:
    table = draw_random_blocks(2, 28, 4, 3, 0)
    assert table.shape == (2, 5, 3)
    assert table.min() == -1
    assert draw_random_blocks(2, 9, 4, 1, 0).shape == (2, 1, 1)
    assert draw_random_blocks(2, 4, 4, 1, 0).shape == (2, 0, 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_size", 1, "must be at least 2"),
        ("num_random_blocks", 0, "must be at least 1"),
        ("random_blocks", "firstblock", "did you mean 'first_block'"),
        ("seed", -1, r"must be from 0 to 2\^32 - 1"),
        ("table_tokens", 0, "must be at least 1"),
    ],
)
def test_invalid_value_is_rejected_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"attention\.{field}=.*{message}"):
        BigBirdAttentionConfig(num_heads=2, **{field: value})  # type: ignore[arg-type] # invalid on purpose


def test_configuration_that_does_not_fit_the_encoder_is_rejected() -> None:
    config = BigBirdAttentionConfig(num_heads=2, table_tokens=60)
    sizes = EncoderSizes(8, 61, is_causal=False, hidden_dropout=0.0, layer_norm_eps=1e-12)
    with pytest.raises(ConfigError, match="table_tokens=60: must be at least 61, the maximum input length"):
        config.check_sizes(sizes)
    with pytest.raises(ConfigError, match="is_causal must be false"):
        config.check_sizes(sizes._replace(max_tokens=60, is_causal=True))
