"""The arithmetic of the walkthrough page in Node.js, compared with NumPy."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_viewer.walkthrough import HeadValues
from walkthrough_pages import Array, sample, softmax

VIEWER = Path(__file__).parents[2] / "viewer"
SIZE = len(sample().tokens)
PROGRAM = """
import { readFileSync } from "node:fs";
const math = await import(process.argv[1]);
const [layer, tokens, head, row, options] = JSON.parse(readFileSync(0, "utf-8"));
for (const name of ["query", "key", "value", "weights"]) layer[name] = Float32Array.from(layer[name]);
layer.bias = layer.bias && Float32Array.from(layer.bias, (value) => value ?? -Infinity);
const { scores, weights } = math.rowOf(layer, tokens, head, row, options);
process.stdout.write(JSON.stringify({
  scores,
  weights,
  entropy: math.entropy(weights),
  output: [...math.outputOf(layer, tokens, head, weights)],
  shares: math.sharesOf(layer, tokens, head, weights),
  disagreement: math.disagreement(layer, tokens),
}));
"""
MODEL: dict[str, Any] = {"scaled": True, "mask": "none", "padding": 1, "temperature": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {},
    "unscaled": {"scaled": False},
    "causal": {"mask": "causal"},
    "padding": {"mask": "padding", "padding": 4},
    "cold": {"temperature": 0.1},
    "hot and causal": {"temperature": 10.0, "mask": "causal", "scaled": False},
}


@pytest.fixture(scope="module")
def module(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled module."""
    path = tmp_path_factory.mktemp("walkthrough") / "attention.mjs"
    source = VIEWER / "src" / "walkthrough" / "attention.ts"
    esbuild = str(node_modules / ".bin" / "esbuild")
    options = ["--bundle", "--format=esm", "--log-level=warning", f"--outfile={path}"]
    subprocess.run([esbuild, str(source), *options], check=True)
    return path


def computed(
    module: Path, values: HeadValues, head: int, row: int, options: dict[str, Any]
) -> dict[str, Any]:
    heads, _, key_size = values.query.shape
    names = ("query", "key", "value", "weights")
    layer: dict[str, Any] = {name: getattr(values, name).ravel().tolist() for name in names}
    layer |= {"heads": heads, "keySize": key_size, "valueSize": values.value.shape[-1], "scale": values.scale}
    bias = (
        None if values.bias is None else [each if np.isfinite(each) else None for each in values.bias.ravel()]
    )
    given = json.dumps([layer | {"bias": bias}, SIZE, head, row, options])
    command = ["node", "--input-type=module", "-e", PROGRAM, str(module)]
    result = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def expected_scores(values: HeadValues, head: int, row: int, options: dict[str, Any]) -> Array:
    other = values.query.shape[-1] ** -0.5 if values.scale == 1 else 1.0
    scale = values.scale if options["scaled"] else other
    scores = scale * (values.query[head, row].astype(float) @ values.key[head].T.astype(float))
    if values.bias is not None:
        scores = scores + values.bias[head, row].astype(np.float32)
    columns = np.arange(SIZE)
    masked = {
        "none": columns < 0,
        "causal": columns > row,
        "padding": columns >= SIZE - options["padding"],
    }[options["mask"]]
    return np.where(masked, -np.inf, scores)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("layer", "head", "row"), [(0, 1, 5), (2, 2, 3)])
def test_row_matches_numpy(module: Path, name: str, layer: int, head: int, row: int) -> None:
    options: dict[str, Any] = MODEL | OPTIONS[name]
    values = sample().layers[layer]
    actual = computed(module, values, head, row, options)
    scores = expected_scores(values, head, row, options)
    weights = softmax(scores / options["temperature"])
    assert [score is None for score in actual["scores"]] == np.isneginf(
        scores
    ).tolist()  # JSON has no -Infinity
    np.testing.assert_allclose(
        [-np.inf if score is None else score for score in actual["scores"]], scores, rtol=1e-12
    )
    np.testing.assert_allclose(actual["weights"], weights, rtol=1e-9, atol=1e-15)
    assert sum(actual["weights"]) == pytest.approx(1, abs=1e-12)
    positive = weights[weights > 0]
    assert actual["entropy"] == pytest.approx(-(positive * np.log(positive)).sum(), abs=1e-12)
    output = weights @ values.value[head]
    np.testing.assert_allclose(actual["output"], output, atol=1e-12)
    shares = weights * (values.value[head] @ output) / (output @ output)
    np.testing.assert_allclose(actual["shares"], shares, atol=1e-12)
    assert sum(actual["shares"]) == pytest.approx(1)
    assert actual["disagreement"] < 1e-6


def test_disagreement_is_the_largest_difference_of_all_heads(module: Path) -> None:
    values = sample().layers[0]
    values.weights[1, 10, 0] -= 0.25
    assert computed(module, values, 0, 0, MODEL)["disagreement"] == pytest.approx(0.25, abs=1e-6)
