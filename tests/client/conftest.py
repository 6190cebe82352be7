"""What the client's tests share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from attnlens_client import Client
from references import Reference
from served import ServerProcess

Array = npt.NDArray[np.float32]
Outputs = Callable[[str], tuple[Array, Array]]


@pytest.fixture
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Five hundred passages of real prose, a sentence to a paragraph each."""
    path = Path(__file__).parent.parent / "data" / "passages.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def outputs(reference: Reference) -> Outputs:
    """A text alone through plain ONNX Runtime: hidden states (T, D) and attention weights (L, H, T, T)."""

    def run(text: str) -> tuple[Array, Array]:
        hidden_states, *attentions = reference(text).values()
        return hidden_states, np.stack(attentions)

    return run
