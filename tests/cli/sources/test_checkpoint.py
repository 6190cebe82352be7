"""Serving a checkpoint, with a real export in a child process."""

import sys
from pathlib import Path

from attnlens.bundle import read_manifest
from attnlens_cli.sources.cache import entry_of
from attnlens_cli.sources.source import Checkpoint
from attnlens_client import Client
from served import ServerProcess
from small_bundles import MODELS, copy_without_json
from small_files import write_pooling_files


def test_checkpoint_is_served_by_a_process_without_pytorch(tmp_path: Path) -> None:
    checkpoint, cache = tmp_path / "tiny", tmp_path / "cache"
    MODELS["wordpiece"].make().save_pretrained(checkpoint)
    copy_without_json("wordpiece", checkpoint)
    write_pooling_files(checkpoint, 96)
    with ServerProcess(checkpoint, "--cache-dir", str(cache)) as server, Client(server.address) as client:
        assert client.embed(["a text"]).shape == (1, 96)
        assert client.get_model().name == "tiny"
        assert "Tracing the encoder\n" in server.log()
        if sys.platform == "linux":
            files = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert "onnxruntime" in files
            assert "libtorch" not in files
    entry = entry_of(cache, Checkpoint("", checkpoint).exported_from("fp32"))
    assert entry.reason_to_export() == ""
    assert read_manifest(entry.directory).parity.passed
