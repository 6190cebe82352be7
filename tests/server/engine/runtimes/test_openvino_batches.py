"""OpenVINO results do not depend on the batch, and few distinct shapes need compiled kernels."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from attnlens.openvino import multiplies_bf16
from attnlens_server.bundle import open_bundle
from attnlens_server.config import Precision, ServerConfig
from attnlens_server.engine import Engine, Item, RequestedOutput
from attnlens_server.engine.runtimes.openvino_runtime import BATCH_TOKENS

LENGTHS = (1, 2, 3, 5, 8, 9, 11, 15, 16, 17, 18, 20, 24, 30, 31, 32, 33, 40, 47, 48, 49, 60)


def hidden_states(
    engine: Engine, texts: list[npt.NDArray[np.int64]], *, at_once: bool
) -> list[npt.NDArray[np.float32]]:
    """Return the token vectors (T, D) of each text, run alone or queued together."""
    items = [Item(text, (RequestedOutput("last_hidden_state"),)) for text in texts]
    if at_once:
        engine.submit(items, kind="embeddings")
        return [item.future.result(60).arrays[0] for item in items]
    return [engine.submit([item], kind="embeddings")[0].result(60).arrays[0] for item in items]


@pytest.fixture(params=["fp32", "bf16"])
def engine(minilm_bundle: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    precision: Precision = request.param
    if precision == "bf16" and not multiplies_bf16():
        pytest.skip("needs a processor with bf16")
    config = ServerConfig(bundle=minilm_bundle, engine="openvino", precision=precision, threads=2, lanes=2)
    running = Engine(open_bundle(minilm_bundle, precision), config)
    running.start(max_tokens=16)
    yield running
    running.close()


def test_results_are_bit_identical_alone_on_all_threads_and_in_any_batch(engine: Engine) -> None:
    chance = np.random.default_rng(5)
    texts = [chance.integers(1000, 20_000, length) for length in (*LENGTHS, *LENGTHS[::-1])]
    alone = hidden_states(engine, texts, at_once=False)
    for found, expected in zip(hidden_states(engine, texts, at_once=True), alone, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert engine.lanes["embeddings"].num_computed_tokens > engine.lanes["embeddings"].num_live_tokens


def test_docs_state_the_default_batch_tokens() -> None:
    for page in ("options.md", "operations.md"):  # the first page is generated from the help text
        text = (Path(__file__).parents[4] / "docs" / page).read_text("utf-8")
        assert re.search(rf"0(:| means) 256 on a CPU, {BATCH_TOKENS[True]} with OpenVINO", text)
