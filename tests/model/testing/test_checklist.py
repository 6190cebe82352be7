"""The checklist finds planted mistakes, and correct layers pass."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertSelfAttention

from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.attention.mechanism import AttentionConfig, BatchInputs, EncoderSizes
from attnlens_model.attention.parts.masks import causal_keep_mask
from attnlens_model.testing import LayerCallError, LayerReport, Status, check_attention
from examples import attention_pitfalls as pitfalls

HIDDEN_SIZE, NUM_HEADS = 24, 4


class Mechanism(nn.Module):
    """One layer of a mechanism with the inputs that it shares with other layers."""

    def __init__(self, config: AttentionConfig, *, is_causal: bool = False) -> None:
        super().__init__()
        sizes = EncoderSizes(HIDDEN_SIZE, 64, is_causal, 0.0, 1e-5)
        self.layer, self.shared, self.is_causal = (
            config.make_layer(sizes),
            config.make_shared(sizes),
            is_causal,
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape[:2]
        mask = torch.ones(shape, dtype=torch.int64) if attention_mask is None else attention_mask.long()
        keep = mask[:, None, None].float()
        if self.is_causal:
            keep = keep * causal_keep_mask(torch.arange(shape[1]))
        context, outputs = self.layer(hidden_states, *self.shared(BatchInputs(mask, keep)))
        return context, outputs["attention_weights"]


def mechanism(kind: str, *, is_causal: bool = False, **options: Any) -> Mechanism:
    config = ATTENTION_KINDS[kind].read({"kind": kind, "num_heads": NUM_HEADS, **options}, {})
    torch.manual_seed(0)
    return Mechanism(config, is_causal=is_causal)


def check(layer: nn.Module, **options: Any) -> LayerReport:
    arguments = {"hidden_size": HIDDEN_SIZE, "num_heads": NUM_HEADS, **options}
    return check_attention(layer, **arguments)


def window_with_global_token(num_tokens: int) -> Tensor:
    positions = torch.arange(num_tokens)
    allowed = (positions[:, None] - positions).abs() <= 1
    allowed[0], allowed[:, 0] = True, True
    return allowed


@pytest.mark.parametrize(
    ("layer", "name"), pitfalls.PITFALLS.items(), ids=lambda it: getattr(it, "__name__", "")
)
def test_mistake_fails_the_check_that_names_it(layer: type[pitfalls.SelfAttention], name: str) -> None:
    failures = {item.name: item for item in pitfalls.check(layer).failures}
    assert name in failures
    assert failures[name].meaning
    assert failures[name].remedy


class MaskOfFirstText(pitfalls.SelfAttention):
    """The mask of the first text is applied to the whole batch."""

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None if mask is None else mask[:1])


class AddedWithWrongSign(pitfalls.SelfAttention):
    """A large number is added to the scores of padded keys."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores + 1e4 * ~mask[:, None, None, :]).softmax(dim=-1)


class ScaledTwice(pitfalls.SelfAttention):
    """Queries and scores are divided by sqrt(K)."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(query / math.sqrt(self.head_size), key)


class WeightsTransposed(pitfalls.SelfAttention):
    """Values are multiplied by the transposed weights, and the correct weights are returned."""

    def drop(self, weights: Tensor) -> Tensor:
        return weights.transpose(-1, -2)


class SoftmaxInHalfPrecision(pitfalls.SelfAttention):
    """The softmax is computed in bf16."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weights(scores.bfloat16(), mask).float()


@pytest.mark.parametrize(
    ("layer", "name", "measured", "remedy"),
    [
        (MaskOfFirstText, "padding mask", "padding of text 0 changes text 1", "Broadcast the mask"),
        (AddedWithWrongSign, "padding mask", "a change of padding changes", "Set scores of padded keys"),
        (ScaledTwice, "scaling", "0.0625 instead of 1 / sqrt(16) = 0.25", "The factor is applied twice"),
        (WeightsTransposed, "row sums", "its columns sum to 1", "Multiply without a transpose"),
        (SoftmaxInHalfPrecision, "row sums", "the softmax is computed in bfloat16", "in float32"),
    ],
)
def test_other_mistakes_are_explained(
    layer: type[pitfalls.SelfAttention], name: str, measured: str, remedy: str
) -> None:
    [failure] = [item for item in pitfalls.check(layer).failures if item.name == name]
    assert measured in failure.measured
    assert remedy in failure.remedy


def test_causal_layer_must_not_attend_to_padding_before_the_text() -> None:
    class CausalPaddingIgnored(pitfalls.PaddingIgnored):
        is_causal = True

    [failure] = pitfalls.check(CausalPaddingIgnored).failures
    assert failure.name == "padding mask"


def test_page_about_pitfalls_lists_every_mistake_with_its_check() -> None:
    page = (Path(__file__).parents[3] / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([a-z ]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert rows == [(layer.__name__, name) for layer, name in pitfalls.PITFALLS.items()]


@pytest.mark.parametrize("layer", pitfalls.CORRECT)
def test_correct_layer_passes_all_checks(layer: type[pitfalls.SelfAttention]) -> None:
    report = pitfalls.check(layer)
    assert report.passed, str(report)
    skipped = {item.name for item in report.items if item.status is Status.SKIPPED}
    assert skipped <= {"token order", "reference"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_passes(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS, dropout=0.1, batch_first=batch_first)
    report = check(layer)
    assert report.passed, str(report)


@pytest.mark.parametrize("batch_first", [True, False])
def test_layer_of_nn_transformer_encoder_passes(batch_first: bool) -> None:
    torch.manual_seed(0)
    report = check(nn.TransformerEncoderLayer(HIDDEN_SIZE, NUM_HEADS, batch_first=batch_first))
    assert report.passed, str(report)


class WithDefaultLayout(nn.Module):
    """Passes (B, T, D) to `nn.MultiheadAttention`, which takes (T, B, D) by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS)

    def forward(self, states: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.attention(states, states, states, key_padding_mask=key_padding_mask)[0]
        return result


def test_default_layout_is_named_once_and_no_mask_is_suspected() -> None:
    torch.manual_seed(0)
    report = check(WithDefaultLayout())
    assert [item.name for item in report.failures] == ["batch independence", "score shape"]
    assert {item.remedy.partition(":")[0] for item in report.failures} == {
        "attention is an nn.MultiheadAttention with batch_first=False, which takes (T, B, D)"
    }


def test_bert_of_transformers_passes() -> None:
    config = transformers.BertConfig(hidden_size=HIDDEN_SIZE, num_attention_heads=NUM_HEADS)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = BertSelfAttention(config)  # type: ignore[no-untyped-call]
    report = check(layer, mask_style="additive")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        pytest.param(lambda: mechanism("softmax"), {}, id="softmax"),
        pytest.param(lambda: mechanism("softmax", is_causal=True), {"is_causal": True}, id="causal"),
        pytest.param(
            lambda: mechanism("softmax", num_key_value_heads=2, rotary={"theta": 100.0}),
            {"uses_positions": True},
            id="grouped with rotary",
        ),
        pytest.param(lambda: mechanism("softmax", alibi=True), {"uses_positions": True}, id="alibi"),
        pytest.param(
            lambda: mechanism("disentangled", terms="c2p|p2c"),
            {"uses_positions": True, "scale": (6 * 3) ** -0.5},
            id="disentangled",
        ),
        pytest.param(
            lambda: mechanism("longformer", window=1, form="dense"),
            {"allowed": window_with_global_token},
            id="longformer",
        ),
        pytest.param(
            lambda: mechanism("big_bird", block_size=4, num_random_blocks=1, table_tokens=64),
            {"uses_positions": True},
            id="big_bird",
        ),
        pytest.param(lambda: mechanism("overlapping", overlap=2), {"num_heads": NUM_HEADS}, id="overlapping"),
        pytest.param(lambda: mechanism("mixture", shared_heads=1, active_heads=2), {}, id="mixture"),
        pytest.param(lambda: mechanism("composed"), {}, id="composed"),
    ],
)
def test_mechanisms_of_attnlens_pass(layer: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    report = check(layer(), **options)
    assert report.passed, str(report)


class BareHead(nn.Module):
    """A single head without an output projection, which returns no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(3))

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key = self.query(hidden_states), self.key(hidden_states)
        weights = (query @ key.transpose(1, 2) / math.sqrt(HIDDEN_SIZE)).softmax(dim=-1)
        return torch.as_tensor(weights @ self.value(hidden_states))


class FixedTril(BareHead):
    """A causal mask of the head size, sliced to the number of tokens: it works up to that length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "tril", torch.tril(torch.ones(HIDDEN_SIZE // NUM_HEADS, HIDDEN_SIZE // NUM_HEADS))
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        num_tokens = hidden_states.shape[1]
        query, key = self.query(hidden_states), self.key(hidden_states)
        scores = query @ key.transpose(1, 2) / math.sqrt(HIDDEN_SIZE)
        hidden = self.get_buffer("tril")[:num_tokens, :num_tokens] == 0
        return torch.as_tensor(
            scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ self.value(hidden_states)
        )


def test_weights_are_observed_if_the_layer_does_not_return_them() -> None:
    report = check(BareHead(), num_heads=None)
    assert report.passed, str(report)
    assert {item.name: item for item in report.items}["row sums"].status is Status.PASSED


def test_sliced_mask_of_the_head_size_fails_for_longer_inputs() -> None:
    report = check(FixedTril(), is_causal=True)
    [lengths] = [item for item in report.failures if item.name == "input lengths"]
    assert "T = 7 fails (the layer has the buffer `tril` (6, 6))" in lengths.measured


def test_reference_is_compared() -> None:
    torch.manual_seed(0)
    layer = BareHead()
    assert check(layer, num_heads=1, reference=layer).passed
    [failure] = check(layer, num_heads=1, reference=lambda states: layer(states) + 1e-3).failures
    assert failure.name == "reference"
    assert failure.measured == "maximum absolute difference 0.001, limit 1e-05"


def test_layer_is_not_modified() -> None:
    layer = pitfalls.SelfAttention(dropout=0.1).train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    check_attention(layer, hidden_size=pitfalls.HIDDEN_SIZE)
    assert layer.training
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())


def test_global_random_state_is_preserved() -> None:
    layer = BareHead()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check(layer, num_heads=1)
    assert torch.rand(4).equal(expected)


def test_layer_with_another_signature_needs_call() -> None:
    class Cross(BareHead):
        def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # type: ignore[override]
            assert queries.shape == keys.shape
            return super().forward(queries)

    [failure] = check(Cross(), num_heads=1).failures
    assert failure.name == "call"
    assert check(Cross(), num_heads=1, call=lambda layer, states: layer(states, states)).passed


def test_invalid_mask_style_is_rejected() -> None:
    with pytest.raises(LayerCallError, match="mask_style='both' is invalid: use keep, ignore, additive"):
        check(BareHead(), mask_style="both")


def test_report_lists_meaning_and_fix_and_raises() -> None:
    report = pitfalls.check(pitfalls.NoScaling)
    lines = str(report).splitlines()
    assert lines[0] == "NoScaling: 1 of 17 checks failed"
    [start] = [number for number, line in enumerate(lines) if line.startswith("  failed   scaling")]
    assert lines[start + 2] == (
        "           Fix: Divide scores by the square root of the head size, K, not of the hidden size."
    )
    with pytest.raises(AssertionError, match="NoScaling: 1 of 17 checks failed"):
        report.raise_if_failed()
