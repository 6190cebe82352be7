"""A bundle directory is replaced by a new one with the same name while it is served."""

import os
import shutil
import sys
from pathlib import Path

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from served import ServerProcess

INPUTS = [pb.Input(text="a bundle is replaced")]


def answers(stub: EncoderServiceStub) -> list[bytes]:
    """Vector, attention and tokens of a text, without timings."""
    embedded = stub.Embed(pb.EmbedRequest(inputs=INPUTS), timeout=60)
    request = pb.EncodeRequest(inputs=INPUTS, attention=[pb.AttentionQuery()])
    [encoded] = stub.Encode(request, timeout=60).results
    return [
        embedded.embeddings.data,
        encoded.attention[0].dense.data,
        *(token.text.encode() for token in encoded.tokens),
    ]


@pytest.mark.parametrize("is_kept", [True, False], ids=["the old one is kept", "the old one is removed"])
def test_server_keeps_serving_the_bundle_it_opened(
    minilm_bundle: Path, tmp_path: Path, *, is_kept: bool
) -> None:
    bundle, other = tmp_path / "bundle", tmp_path / "other"
    shutil.copytree(minilm_bundle, bundle)
    for path in (file for file in bundle.rglob("*") if file.is_file()):
        new = other / path.relative_to(bundle)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(b"another bundle")
    # With one lane there is one session per graph, and both are open after the first responses.
    with ServerProcess(bundle, "--lanes", "1") as server, grpc.insecure_channel(server.address) as channel:
        stub = EncoderServiceStub(channel)
        before = answers(stub)
        bundle.rename(tmp_path / "old")
        other.rename(bundle)
        if not is_kept:
            shutil.rmtree(tmp_path / "old")
        for _ in range(3):
            assert answers(stub) == before
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time of another process")
def test_server_whose_weights_are_truncated_while_a_batch_runs_logs_the_cause(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(minilm_bundle, tmp_path / "bundle"))
    options = ("--lanes", "1", "--threads", "1", "--max-batch-tokens", "16384")
    with ServerProcess(bundle, *options) as server, grpc.insecure_channel(server.address) as channel:
        stub = EncoderServiceStub(channel)
        stub.Embed(pb.EmbedRequest(inputs=INPUTS), timeout=60)
        before = cpu_seconds(server.process.pid)
        long = [pb.Input(text="word " * 250)] * 64
        call = stub.Embed.future(pb.EmbedRequest(inputs=long), timeout=60)
        while cpu_seconds(server.process.pid) < before + 1:  # the batch is running, and takes seconds
            assert not call.done()
        (bundle / "onnx" / "model.onnx").write_bytes(b"")
        assert server.process.wait(timeout=30) == 1
        assert call.exception() is not None
        assert "a file that is mapped into memory was truncated (SIGBUS)" in server.log()
        assert f"such as weights of {bundle}" in server.log()
