"""Calls of tools that open bundles, each in a separate process and environment."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from references import TEXTS

if TYPE_CHECKING:
    from ecosystem.samples import Sample

HERE = Path(__file__).parent
NODE_PROJECT = HERE.parent / "node"
PYTHON = HERE.parents[1] / ".ecosystem" / "bin" / "python"

ATTENTION_TEXTS = [TEXTS[0], TEXTS[2], "", TEXTS[4]]

MINILM = "all-MiniLM-L6-v2"
# Calls limited to some samples. Random weights would hide the effects of lower precision.
SAMPLES_OF = {
    "embed with attentions": [MINILM],
    "embed by default": [MINILM],
    "embed with attentions by default": [MINILM],
    "attend": [MINILM, "roberta"],
}
RERANKER = "reranker"

Calls = dict[str, tuple[str, dict[str, Any]]]
"""Function and arguments, by call name."""

Answers = dict[str, dict[str, Any]]
"""Results of a tool by sample, then by call."""


@dataclass(frozen=True)
class Reranker:
    """The bundle of a trained reranker, and its logits with transformers."""

    bundle: Path
    pairs: list[tuple[str, str]]
    logits: list[float]

    def calls(self) -> Calls:
        return {"score": ("score", {"bundle": str(self.bundle), "pairs": self.pairs})}


@dataclass(frozen=True)
class Tool:
    """A module `with_*`, its command, and its calls per sample."""

    command: list[str]
    calls: Callable[["Sample"], Calls]


def sentence_transformers_calls(sample: "Sample") -> Calls:
    arguments = {"bundle": str(sample.bundle), "texts": sample.texts}
    other_file = {"file_name": "onnx/model_attentions.onnx"}
    return {"embed": ("embed", arguments), "embed with attentions": ("embed", arguments | other_file)}


def openvino_calls(sample: "Sample") -> Calls:
    default = {"bundle": str(sample.bundle), "texts": sample.texts}
    exact = default | {"precision": "f32"}
    other_file = {"file_name": "onnx/model_attentions.onnx"}
    return {
        "embed": ("embed", exact),
        "embed with attentions": ("embed", exact | other_file),
        "embed by default": ("embed", default),
        "embed with attentions by default": ("embed", default | other_file),
    }


def optimum_calls(sample: "Sample") -> Calls:
    arguments = pooled_by_hand(sample)
    other_file = {"file_name": "model_attentions.onnx"}
    return {
        "embed": ("embed", arguments),
        "embed with attentions": ("embed", arguments | other_file),
        "attend": ("attend", {"bundle": str(sample.bundle), "texts": ATTENTION_TEXTS}),
    }


def fastembed_calls(sample: "Sample") -> Calls:
    names = {"name": sample.bundle.parent.name, "dim": sample.vectors.shape[1]}
    return {"embed": ("embed", pooled_by_hand(sample) | names)}


def transformers_js_calls(sample: "Sample") -> Calls:
    arguments = pooled_by_hand(sample)
    return {
        "embed": ("embed", arguments | {"closeCutTexts": True}),
        "embed cut": ("embed", arguments),
        "attend": ("attend", {"bundle": str(sample.bundle), "texts": ATTENTION_TEXTS}),
    }


def pooled_by_hand(sample: "Sample") -> dict[str, Any]:
    pooling = {"pooling": sample.pooling, "normalize": sample.normalize}
    return {"bundle": str(sample.bundle), "texts": sample.texts} | pooling


def python(module: str) -> list[str]:
    return [str(PYTHON), str(HERE / "call.py"), module]


TOOLS = {
    "sentence-transformers": Tool(python("with_sentence_transformers"), sentence_transformers_calls),
    # Requirements of sentence-transformers for OpenVINO.
    "optimum-intel": Tool(python("with_sentence_transformers_openvino"), openvino_calls),
    "optimum-onnx": Tool(python("with_optimum"), optimum_calls),
    "fastembed": Tool(python("with_fastembed"), fastembed_calls),
    "@huggingface/transformers": Tool(
        ["node", str(NODE_PROJECT / "call.mjs"), "with_transformers_js"], transformers_js_calls
    ),
}


def run_tool(tool: Tool, samples: dict[str, "Sample"], reranker: Reranker, directory: Path) -> Answers:
    if not (PYTHON.exists() and (NODE_PROJECT / "node_modules").exists()):
        pytest.fail("the environments of the tools are absent: make test-ecosystem")
    calls = {name: _needed(name, tool.calls(sample)) for name, sample in samples.items()}
    calls[RERANKER] = reranker.calls()
    flat = [call for each in calls.values() for call in each.values()]
    (directory / "calls.json").write_text(json.dumps(flat), encoding="utf-8")
    # An empty cache and no hub access: all files are loaded from the bundle.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [*tool.command, str(directory / "calls.json"), str(directory / "results.json")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    results = iter(json.loads((directory / "results.json").read_text(encoding="utf-8")))
    return {name: {label: next(results) for label in each} for name, each in calls.items()}


def _needed(name: str, calls: Calls) -> Calls:
    """Omit calls that would be repeated for another sample."""
    return {label: call for label, call in calls.items() if name in SAMPLES_OF.get(label, [name])}


def pinned_versions() -> dict[str, str]:
    """Return the package versions in the tools' environments."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (HERE / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    dependencies: dict[str, str] = json.loads((NODE_PROJECT / "package.json").read_text("utf-8"))[
        "dependencies"
    ]
    return dict(pins) | dependencies


def table(differences: dict[tuple[str, str], float]) -> Iterator[str]:
    """Return a Markdown table of the largest difference per tool and sample."""
    tools = list(dict.fromkeys(tool for tool, _ in differences))
    names = list(dict.fromkeys(name for _, name in differences))
    versions = pinned_versions()
    yield f"| tool | version | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for tool in tools:
        cells = [f"{differences[tool, name]:.1e}" if (tool, name) in differences else "" for name in names]
        yield f"| {tool} | {versions[tool]} | {' | '.join(cells)} |"
