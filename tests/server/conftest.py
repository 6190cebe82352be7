"""What the server's tests share."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import tokenizers

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from references import Reference
from served import ServerProcess


@pytest.fixture(scope="session")
def reference(minilm_bundle: Path) -> Reference:
    """A text alone, through plain tokenizers and plain ONNX Runtime: every output by name."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    session = onnxruntime.InferenceSession(
        minilm_bundle / "onnx" / "model_attentions.onnx", providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]

    def run(text: str) -> dict[str, npt.NDArray[np.float32]]:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        return {name: array[0] for name, array in zip(names, session.run(names, inputs), strict=True)}

    return run


@pytest.fixture
def stub(minilm_server: ServerProcess) -> Iterator[EncoderServiceStub]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(minilm_server.address, options=options) as channel:
        yield EncoderServiceStub(channel)
