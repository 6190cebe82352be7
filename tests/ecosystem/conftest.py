"""Each tool runs once over all samples, on first use, and the tests check its results."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ecosystem.tools import MINILM, TOOLS, Answers, Reranker, run_tool, table

if TYPE_CHECKING:
    from ecosystem.samples import Sample
    from trained_heads import TrainedHeads

DIFFERENCES = pytest.StashKey[dict[tuple[str, str], float]]()


@pytest.fixture(scope="session")
def samples(
    minilm_dir: Path, minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> "dict[str, Sample]":
    """Return MiniLM with its real weights, and small random encoders of other kinds."""
    from ecosystem.samples import KINDS, Sample, draw  # noqa: PLC0415 - imports torch

    directory = tmp_path_factory.mktemp("ecosystem")
    minilm = Sample(minilm_dir, minilm_bundle, "mean", normalize=True)
    return {MINILM: minilm} | {name: draw(kind, directory / name) for name, kind in KINDS.items()}


@pytest.fixture(scope="session")
def reranker(trained_heads: "TrainedHeads", tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    """Return a reranker with trained weights."""
    from ecosystem.samples import draw_reranker  # noqa: PLC0415 - imports torch

    return draw_reranker(trained_heads.reranker, tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="session")
def ask(
    samples: "dict[str, Sample]", reranker: Reranker, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Answers]:
    """Return a function that returns the results of a tool."""
    answers: dict[str, Answers] = {}

    def answer(tool: str) -> Answers:
        if tool not in answers:
            answers[tool] = run_tool(TOOLS[tool], samples, reranker, tmp_path_factory.mktemp("answers"))
        return answers[tool]

    return answer


@pytest.fixture(scope="session")
def differences(pytestconfig: pytest.Config) -> dict[tuple[str, str], float]:
    """Return the largest differences by tool and sample, printed at the end."""
    measured: dict[tuple[str, str], float] = {}
    pytestconfig.stash[DIFFERENCES] = measured
    return measured


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if DIFFERENCES in config.stash:
        terminalreporter.section("largest difference from sentence-transformers with the PyTorch checkpoint")
        terminalreporter.write_line("\n".join(table(config.stash[DIFFERENCES])))
