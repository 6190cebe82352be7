"""Steps of a lesson compared with independent calculations on MiniLM."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from attnlens_analysis.errors import UnknownTokenError
from attnlens_analysis.teach import Contexts, HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.content import Step, number
from attnlens_analysis.teach.numbers import principal_cosines
from attnlens_analysis.teach.parameters import read_parameters
from attnlens_analysis.teach.recurrence import measure_recurrence
from attnlens_model import load_checkpoint

SENTENCE = "The animal didn't cross the street because it was too tired."
LAYER, HEAD, ROW, WIDTH = 3, 1, 10, 32


@pytest.fixture(scope="module")
def trace(minilm_bundle: Path) -> HeadTrace:
    return trace_head(minilm_bundle, SENTENCE, "it", layer=LAYER, head=HEAD, lengths=(16, 64))


@pytest.fixture(scope="module")
def steps(trace: HeadTrace) -> Mapping[str, Step]:
    return {step.key: step for step in make_lesson(trace, "attnlens teach").steps}


@pytest.fixture(scope="module")
def layer(minilm_dir: Path) -> torch.nn.Module:
    """Return the layer of the lesson in PyTorch, in float64."""
    return load_checkpoint(minilm_dir).encoder.layers[LAYER].double()


def cells(step: Step) -> dict[str, tuple[str, ...]]:
    """Return the cells of a step's table by their first column."""
    assert step.table is not None
    return {name: tuple(others) for name, *others in step.table.rows}


def test_lengths_are_measured_for_attention_and_the_loop(trace: HeadTrace, steps: Mapping[str, Step]) -> None:
    assert [length for length, _, _ in trace.races] == [16, 64]
    assert list(cells(steps["why"])) == ["16", "64"]
    assert "9,633,792 multiplications" in " ".join(steps["why"].text)
    assert "takes 8 steps, attention 1" in " ".join(steps["why"].text)
    [(_, attention, loop)] = measure_recurrence(10, 4, [8])  # the width is not a multiple of the heads
    assert attention > 0
    assert loop > 0


def test_recurrent_layer_reads_a_later_token_from_right_to_left(trace: HeadTrace) -> None:
    later = {step.key: step for step in make_lesson(replace(trace, target=13), "attnlens teach").steps}
    sentence = (
        "From “tired” to “it”, a recurrent layer that reads from right to left takes 3 steps, attention 1."
    )
    assert sentence in later["why"].text[0]


def test_scores_have_two_directions(steps: Mapping[str, Step]) -> None:
    assert "q·k is 21.6876" in steps["roles"].text[0]
    assert "11.4675 in the other direction" in steps["roles"].text[0]


def test_shapes_and_parameters_match_pytorch(steps: Mapping[str, Step], layer: torch.nn.Module) -> None:
    shapes = {name: shape for name, (_, shape) in cells(steps["shapes"]).items()}
    assert shapes["scores per head"] == "[16, 16]"
    assert shapes["Q, K, V per head"] == "[16, 32]"
    assert shapes["W_O"] == "[384, 384]"
    assert shapes["W_Q, W_K, W_V per head"] == "[384, 32]"
    total = sum(parameter.numel() for parameter in layer.parameters())
    assert f"{total:,} in total" in steps["shapes"].text[1]
    assert total == 4 * (384**2 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384


def test_parameters_are_read_from_a_bundle_with_hard_links(minilm_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(minilm_bundle, tmp_path / "minilm"))
    (tmp_path / "link.onnx").hardlink_to(bundle / "onnx" / "model.onnx")  # as `attnlens layout` does
    parameters = read_parameters(bundle / "onnx" / "model_attentions.onnx", LAYER)
    assert parameters.query is not None
    assert parameters.query.shape == (384, 384)


def test_heads_read_all_features(trace: HeadTrace, steps: Mapping[str, Step], layer: torch.nn.Module) -> None:
    attention = layer.get_submodule("attention")
    sliced = torch.zeros(16, 384, dtype=torch.float64)
    own = slice(HEAD * WIDTH, (HEAD + 1) * WIDTH)
    sliced[:, own] = torch.from_numpy(trace.values.entering)[:, own]
    with torch.no_grad():
        query, key = (attention.get_submodule(name)(sliced)[:, own] for name in ("query", "key"))
        weight = attention.get_parameter("query.weight")[own].detach()
    expected = (query[ROW] @ key.T).numpy() / np.sqrt(WIDTH)
    full, only_slice = cells(steps["heads"])["animal"]
    assert full == "3.8339"
    assert float(only_slice) == pytest.approx(expected[2], abs=2e-4)
    outside = 1 - float((weight[:, own] ** 2).sum() / (weight**2).sum())
    assert f"have {100 * outside:.1f} % of" in steps["heads"].text[0]
    assert f"would be {100 * 11 / 12:.1f} %." in steps["heads"].text[0]


def numeric_trace(scores: torch.Tensor, factor: float) -> float:
    """Return sum over j of da_j/ds_j for a = softmax(factor * s), by central differences."""
    step = 1e-5 * torch.eye(len(scores), dtype=scores.dtype)  # row j changes s_j
    above, below = (((scores + sign * step) * factor).softmax(-1).diagonal() for sign in (1, -1))
    return float((above - below).sum()) / 2e-5


def test_temperature_and_division(trace: HeadTrace, steps: Mapping[str, Step]) -> None:
    scores = torch.from_numpy(trace.values.scores[HEAD, ROW])
    for temperature in (0.5, 1, 2, 4):
        entropy, largest, jacobian = cells(steps["temperature"])[f"{temperature:g}"]
        weights = (scores / temperature).softmax(-1)
        assert float(entropy) == pytest.approx(torch.special.entr(weights).sum().item(), abs=1e-3)
        assert float(largest) == pytest.approx(weights.max().item(), abs=1e-3)
        assert float(jacobian) == pytest.approx(numeric_trace(scores, 1 / temperature), abs=1e-3)
    assert f"{int((scores < 0).sum())} of 16 scores are negative" in steps["temperature"].text[0]


def test_derivatives_with_and_without_the_scale(trace: HeadTrace, steps: Mapping[str, Step]) -> None:
    products = torch.from_numpy(trace.values.query[HEAD, ROW] @ trace.values.key[HEAD].T)
    scaled, unscaled = map(float, re.findall(r"by the scale: (\S+) and (\S+)\. ", steps["scale"].text[1])[0])
    assert scaled == pytest.approx(numeric_trace(products, WIDTH**-0.5), abs=1e-4)
    assert unscaled == pytest.approx(numeric_trace(products, 1.0), rel=1e-2)
    [trace_of_scores] = re.findall(r"a_j \(1 - a_j\), is (\S+),", steps["scale"].text[1])
    assert float(trace_of_scores) == pytest.approx(scaled * WIDTH**0.5, abs=1e-3)


def test_scale_can_be_absorbed(steps: Mapping[str, Step]) -> None:
    assert (
        "with W_Q and b_Q multiplied by 0.176777 instead, weights differ by at most"
        in steps["scale"].text[-1]
    )
    assert float(steps["scale"].text[-1].split()[-1].rstrip(".")) < 1e-12


def test_masked_rows_sum_to_1(trace: HeadTrace, steps: Mapping[str, Step]) -> None:
    table = cells(steps["masks"])
    scores = trace.values.scores[HEAD, ROW, : ROW + 1]
    expected = np.exp(scores[2]) / np.exp(scores).sum()
    assert table["causal"] == ("11", number(expected), "1.0000")
    assert table["padded"] == ("16", "0.6768", "1.0000")
    assert "and by 0.0000 with it" in steps["masks"].text[0]
    assert trace.padded is not None
    assert trace.padded[16:].max() == 0
    np.testing.assert_allclose(trace.padded[:16], trace.values.weights[HEAD, ROW], atol=1e-6)


def test_token_is_followed_through_all_layers(
    minilm_dir: Path, trace: HeadTrace, steps: Mapping[str, Step]
) -> None:
    encoder = load_checkpoint(minilm_dir).encoder.eval()
    sums: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for each in encoder.layers:
        each.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        each.get_submodule("feed_forward").register_forward_hook(lambda *args: sums.append(args[2]))
    ids = torch.from_numpy(trace.sentence.input_ids)
    with torch.inference_mode():
        states.append(encoder(ids, torch.ones_like(ids)).last_hidden_state)
    vectors = [state[0, ROW] for state in states]
    table = cells(steps["layers"])
    assert list(table) == [f"layer {index}" for index in range(6)]
    similarity = torch.nn.functional.cosine_similarity
    for index, (length, _, forward, change, total) in enumerate(table.values()):
        assert float(length) == pytest.approx(vectors[index].norm().item(), rel=1e-3)
        assert float(forward) == pytest.approx(sums[index][0, ROW].norm().item(), rel=1e-3)
        assert float(change) == pytest.approx(
            similarity(vectors[index], vectors[index + 1], dim=0).item(), abs=1e-3
        )
        assert float(total) == pytest.approx(
            similarity(vectors[0], vectors[index + 1], dim=0).item(), abs=1e-3
        )


def test_meanings_of_a_word_diverge(minilm_bundle: Path, steps: Mapping[str, Step]) -> None:
    table = cells(steps["contexts"])
    assert table["layer 0"] == ("1.0000", "1.0000")
    different, same = map(float, table["output"])
    assert different < same - 0.05
    texts = ("It is it.", "So it was.", "Was it so?")
    with pytest.raises(UnknownTokenError, match="'it' is ambiguous"):
        trace_head(minilm_bundle, SENTENCE, "it", contexts=Contexts("it", texts))


def test_token_prefers_another_token(steps: Mapping[str, Step]) -> None:
    assert "q·k of “it” is 8.3842 with itself and 21.6876 with “animal”" in steps["diagonal"].text[-1]


def test_principal_angles_match_scipy(steps: Mapping[str, Step], layer: torch.nn.Module) -> None:
    attention, own = layer.get_submodule("attention"), slice(HEAD * WIDTH, (HEAD + 1) * WIDTH)
    bases = [attention.get_parameter(f"{name}.weight")[own].T.detach().numpy() for name in ("query", "key")]
    cosines = np.cos(scipy.linalg.subspace_angles(*bases))
    largest, _, smallest = map(float, cells(steps["subspaces"])["this head"])
    assert largest == pytest.approx(cosines.max(), abs=1e-4)
    assert smallest == pytest.approx(cosines.min(), abs=1e-4)
    np.testing.assert_allclose(principal_cosines(np.eye(4)[:, :2], np.eye(4)[:, 1:3]), [1, 0], atol=1e-12)
