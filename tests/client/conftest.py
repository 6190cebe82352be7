"""What the client's tests share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import tokenizers

from attnlens_client import Client
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
def outputs(minilm_bundle: Path) -> Outputs:
    """A text alone through plain ONNX Runtime: hidden states (T, D) and attention weights (L, H, T, T)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    session = onnxruntime.InferenceSession(
        minilm_bundle / "onnx" / "model_attentions.onnx", providers=["CPUExecutionProvider"]
    )

    def run(text: str) -> tuple[Array, Array]:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        hidden_states, *attentions = session.run(None, feed)
        return hidden_states[0], np.stack(attentions)[:, 0]

    return run
