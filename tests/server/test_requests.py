"""What checking a request costs: it runs on the event loop, where every other call waits for it."""

import time
from pathlib import Path

import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Architecture, Manifest
from attnlens_server.config import ServerConfig
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.requests import RequestChecker


def seconds_to_refuse(request: pb.EmbedRequest) -> float:
    manifest = Manifest(architecture=Architecture(hidden_size=4))
    checker = RequestChecker(manifest, ServerConfig(bundle=Path()), max_tokens=8, has_tokenizer=True)
    started = time.thread_time()
    with pytest.raises(InvalidFieldsError, match="with the prompt"):
        checker.check_embed(request)
    return time.thread_time() - started


def test_a_large_prompt_is_measured_once_and_not_for_each_text() -> None:
    prompt = "€" * 2_000_000
    one, many = (pb.EmbedRequest(inputs=[pb.Input(text="a")] * count, prompt=prompt) for count in (1, 500))
    assert seconds_to_refuse(many) < 50 * seconds_to_refuse(one)
