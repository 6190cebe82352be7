"""Bundles of modules that users write, compared with the modules."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import attnlens_server
from attnlens_client import AttentionQuery
from attnlens_export import ExportOptions, GraphError, ParityError, SourceError, check_bundle, export_module
from attnlens_export.bundle import BundleSummary
from attnlens_model import ConfigError
from own_modules import (
    HIDDEN_SIZE,
    MAX_TOKENS,
    NUM_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    Base,
    WithBiasPerHead,
    WithCausalBuffer,
    WithEinsum,
    WithFusedAttention,
    WithGroups,
    WithMultiheadAttention,
    WithOwnNorms,
    WithPaddingLeak,
    WithRepeatedGroups,
    WithTransformerEncoder,
    WithTwoCallsOfAttention,
    create,
)

ROOT = Path(__file__).parents[2]
LINKED = [
    WithMultiheadAttention,
    WithBiasPerHead,
    WithEinsum,
    WithOwnNorms,
    WithCausalBuffer,
    WithTransformerEncoder,
    WithGroups,
    WithRepeatedGroups,
]
CAUSAL = (WithCausalBuffer, WithTransformerEncoder)


def export(module: nn.Module, bundle: Path, embeddings: str | None = None) -> BundleSummary:
    return export_module(
        module,
        bundle,
        vocab_size=VOCAB_SIZE,
        max_tokens=MAX_TOKENS,
        is_causal=isinstance(module, CAUSAL),
        embeddings=embeddings,
        options=ExportOptions(faithfulness=False),
    )


Exported = dict[type[nn.Module], tuple[Path, BundleSummary]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tmp_path_factory.mktemp("bundles")
    paths = {kind: directory / kind.__name__ for kind in (*LINKED, WithFusedAttention)}
    return {kind: (path, export(create(kind), path)) for kind, path in paths.items()}


@pytest.mark.parametrize("kind", [*LINKED, WithFusedAttention])
def test_bundle_agrees_with_the_module(kind: type[nn.Module], exported: Exported) -> None:
    bundle, summary = exported[kind]
    assert summary.verdict.passed
    # The same weights, but it returns those of attention.
    module = create(WithTwoCallsOfAttention if kind is WithTransformerEncoder else kind)
    input_ids = torch.arange(2 * 7).reshape(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        states, weights = module(input_ids, mask)
    session = onnxruntime.InferenceSession(bundle / "onnx" / "model_attentions.onnx")
    names = [value.name for value in session.get_outputs()]
    feed = {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()}
    result = dict(zip(names, session.run(None, feed), strict=True))
    assert names == ["last_hidden_state", "attentions.0", "attentions.1"]
    live = mask.numpy() == 1
    assert np.abs(result["last_hidden_state"] - states.numpy())[live].max() <= 1e-5
    for layer, expected in enumerate(weights):
        difference = (result[f"attentions.{layer}"] - expected.numpy()).transpose(0, 2, 1, 3)[live]
        assert np.abs(difference).max() <= 1e-5


@pytest.mark.parametrize("kind", LINKED)
def test_bundle_is_served_and_explained(kind: type[nn.Module], exported: Exported) -> None:
    bundle, summary = exported[kind]
    assert summary.warnings == ()
    with attnlens_server.local(bundle) as model:
        [explanation] = model.explain([[5, 6, 7, 8]], head_contributions=True)
        [encoded] = model.encode([[5, 6, 7, 8]], attention=[AttentionQuery()])
    assert explanation.head_contributions is not None
    assert explanation.head_contributions.shape == (2, NUM_HEADS)
    assert np.abs(explanation.head_contributions).min() > 0
    assert encoded.attention[0].weights.shape == (2, NUM_HEADS, 4, 4)


def test_heads_in_groups_are_in_the_order_of_their_weights(exported: Exported) -> None:
    results = []
    for kind in (WithGroups, WithRepeatedGroups):
        with attnlens_server.local(exported[kind][0]) as model:
            [explanation] = model.explain([[5, 6, 7, 8]], head_contributions=True)
        assert explanation.head_contributions is not None
        results.append(explanation.head_contributions)
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_weights_that_are_not_used_are_not_explained(
    exported: Exported,
) -> None:
    [warning] = exported[WithFusedAttention][1].warnings
    assert "layer 0 does not multiply the attention weights that it returns by values" in warning


class WithHeadsAsGates(WithEinsum):
    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        heads, weights = super().attend(projected, attention_mask)
        return projected[..., :HIDDEN_SIZE] * heads.sigmoid(), weights


def test_operator_behind_the_heads_without_a_rule_is_named(tmp_path: Path) -> None:
    [warning] = export(create(WithHeadsAsGates), tmp_path / "bundle").warnings
    assert "not linear in the head outputs of layer 0: there is no rule for Sigmoid 'sigmoid_0'" in warning


class WithTwoValues(WithEinsum):
    def attend(self, projected: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        heads, weights = super().attend(projected, attention_mask)
        others = projected[..., :HIDDEN_SIZE].view(*projected.shape[:2], NUM_HEADS, -1).transpose(1, 2)
        return heads - (weights @ others).transpose(1, 2).flatten(2), weights


def test_weights_of_two_values_are_not_explained(tmp_path: Path) -> None:
    [warning] = export(create(WithTwoValues), tmp_path / "bundle").warnings
    assert "layer 0 multiplies its attention weights by 2 values, so a head has no single output" in warning


def test_check_compares_with_the_module(
    exported: Exported,
) -> None:
    module, (bundle, _) = create(WithEinsum), exported[WithEinsum]
    assert check_bundle(bundle, module).verdict.passed
    with torch.no_grad():
        module.get_parameter("tokens.weight")[3, 2] += 1
    with pytest.raises(GraphError, match=r"module.tokens.weight\[3, 2\] is .* in the module WithEinsum"):
        check_bundle(bundle, module)
    for source in (None, bundle):
        with pytest.raises(SourceError, match=r"exported from a PyTorch module of your own: pass it"):
            check_bundle(bundle, source)


def test_module_for_the_bundle_of_a_checkpoint_is_rejected(minilm_bundle: Path) -> None:
    with pytest.raises(SourceError, match="exported from a checkpoint: pass its directory"):
        check_bundle(minilm_bundle, create(WithEinsum))


def test_padding_leak_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"max batch difference of last_hidden_state on "):
        export(create(WithPaddingLeak), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_part_of_a_projection_that_nothing_reads_is_cut_off(tmp_path: Path) -> None:
    assert export(create(WithTwoCallsOfAttention), tmp_path / "bundle").warnings == ()


class TextsExchanged(WithMultiheadAttention):
    """`nn.MultiheadAttention` with its default layout, which gets (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS) for _ in range(NUM_LAYERS)
        )


class EmbedsTransposed(WithEinsum):
    def embed(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.tokens(input_ids.mT)
        return result.transpose(0, 1)


class Returning(Base):
    """Returns the results of a function."""

    def __init__(self, results: object) -> None:
        super().__init__()
        self.results = results

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        del attention_mask
        self.tokens(input_ids)
        return self.results


class WithoutEmbedding(WithEinsum):
    """Looks up token embeddings without nn.Embedding."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.tokens.weight[input_ids]


STATES = torch.zeros(2, 3, HIDDEN_SIZE)
WEIGHTS = torch.zeros(2, NUM_HEADS, 3, 3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(Returning(STATES).eval(), "must return two results, .* not NoneType", id="no weights"),
        pytest.param(Returning((STATES, WEIGHTS)).eval(), "a list .* not (2, 4, 3, 3)", id="no list"),
        pytest.param(
            Returning((STATES[0], [WEIGHTS])).eval(),
            "(batch, tokens, hidden size), not (3, 16)",
            id="no batch",
        ),
        pytest.param(
            Returning((STATES, [WEIGHTS, WEIGHTS[:, 0]])).eval(),
            "those of layer 1 are (2, 3, 3). Call nn.MultiheadAttention with average_attn_weights=False",
            id="averaged",
        ),
        pytest.param(nn.Linear(3, 3).eval(), "Linear(input_ids, attention_mask) failed for", id="fails"),
        pytest.param(WithEinsum(), "WithEinsum is in training mode: call eval() first", id="training"),
        pytest.param(
            create(WithEinsum).half(),
            "tokens.weight is torch.float16 on cpu: move the module with float() and cpu()",
            id="fp16",
        ),
        pytest.param(
            create(TextsExchanged),
            "calls nn.MultiheadAttention with texts and tokens exchanged, so texts would attend to each "
            "other: its inputs are (tokens, batch, size), or (batch, tokens, size) with batch_first=True",
            id="layout",
        ),
        pytest.param(
            create(EmbedsTransposed),
            "with input_ids transposed: call it with input_ids",
            id="embeds transposed",
        ),
        pytest.param(create(WithoutEmbedding), "calls no nn.Embedding with input_ids", id="no embedding"),
    ],
)
def test_results_of_other_shapes_are_rejected(module: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        export(module, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_tokens": MAX_TOKENS + 1}, r"shape \(1, 21\): IndexError"),
        ({"vocab_size": VOCAB_SIZE + 1}, r"shape \(1, 20\): IndexError"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ],
)
def test_sizes_must_be_those_of_the_module(sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "max_tokens": MAX_TOKENS} | sizes
    with pytest.raises(ConfigError, match=message):
        export_module(
            create(WithEinsum),
            tmp_path / "bundle",
            vocab_size=sizes["vocab_size"],
            max_tokens=sizes["max_tokens"],
        )


def test_embeddings_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no 'words': pass embeddings=NAME"):
        export(create(WithEinsum), tmp_path / "bundle", embeddings="words")
    with pytest.raises(ConfigError, match=r"positions returns no embeddings \(batch, tokens, size\)"):
        export(create(WithEinsum), tmp_path / "bundle", embeddings="positions")
    assert export(create(WithEinsum), tmp_path / "bundle", embeddings="tokens").warnings == ()


def test_example_explains_a_text() -> None:
    example = ROOT / "examples" / "own_module.py"
    steps = example.read_text(encoding="utf-8").partition("def main() -> None:\n")[2].partition("\n\n\n")[0]
    assert len(steps.splitlines()) <= 30
    shown = subprocess.run([sys.executable, example], capture_output=True, check=True, text=True).stdout
    scores = {token: float(score) for score, token in map(str.split, shown.splitlines()[1:])}
    assert scores["table"] < 0 < scores["snow"]
