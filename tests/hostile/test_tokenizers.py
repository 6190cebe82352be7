"""A tokenizer whose failure does not derive from `Exception`."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from bench.studies.raw_http2 import method
from hostile.target import INVALID_ARGUMENT, OK, Target
from served import ServerProcess

ENDLESS = "a" * 40 + "!"  # makes (a+)+$ exceed its backtracking limit


@pytest.fixture
def panicking_bundle(minilm_bundle: Path, tmp_path: Path) -> Path:
    """MiniLM whose tokenizer has a regular expression that makes the library panic on some texts."""
    bundle = tmp_path / "bundle"
    shutil.copytree(minilm_bundle, bundle)
    tokenizer = json.loads((bundle / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content = json.dumps(tokenizer).encode()
    manifest = json.loads((bundle / "manifest.json").read_text())
    [listed] = [file for file in manifest["files"] if file["path"] == "tokenizer.json"]
    listed |= {"size_bytes": str(len(content)), "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / "tokenizer.json").write_bytes(content)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle


def test_tokenizer_panic_fails_only_the_call(panicking_bundle: Path) -> None:
    with ServerProcess(panicking_bundle) as server:
        target = Target(server)
        before = target.vector()
        inputs = [pb.Input(text=ENDLESS)]
        for name, request in (
            ("Embed", pb.EmbedRequest(inputs=inputs)),
            ("Encode", pb.EncodeRequest(inputs=inputs)),
            ("EncodeStream", pb.EncodeStreamRequest(inputs=inputs)),
            ("Tokenize", pb.TokenizeRequest(inputs=inputs)),
        ):
            for _ in range(3):  # more calls than there are workers
                reply = target.ask(method(name), request.SerializeToString(), timeout_s=20)
                assert (reply.status, reply.reason) == (INVALID_ARGUMENT, "INVALID_FIELD"), name
        assert target.ask(method("ListModels"), b"").status == OK
        assert target.vector() == before
        assert "Traceback" not in server.log()
        assert server.stop() == 0
