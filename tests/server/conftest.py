"""Shared fixtures of the server tests."""

from collections.abc import Iterator

import grpc
import pytest

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from served import ServerProcess


@pytest.fixture
def stub(minilm_server: ServerProcess) -> Iterator[EncoderServiceStub]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(minilm_server.address, options=options) as channel:
        yield EncoderServiceStub(channel)
