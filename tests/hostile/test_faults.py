"""Processes killed at any point, and full disks. tests/server/test_supervisor.py covers hanging lanes.

The points at which processes are killed are random. A failed test prints its seed.
"""

import random
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from attnlens_cli.sources.cache import entry_of
from attnlens_cli.sources.source import Checkpoint
from attnlens_client import AttentionQuery, AttnlensError, Client
from bench.servers import attnlens_server
from served import ServerProcess
from small_bundles import MODELS, copy_without_json
from small_files import write_pooling_files

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]

pytestmark = pytest.mark.extended
NUM_KILLS = 3
TEXTS = ["a text", "another one"]
# Python ignores the signal of this limit, so that writing fails as on a full disk.
LIMITED = ["bash", "-c", 'ulimit -f 64; exec "$@"', "limited"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults") / "tiny"
    MODELS["wordpiece"].make().save_pretrained(directory)
    copy_without_json("wordpiece", directory)
    write_pooling_files(directory, 96)
    return directory


def vectors(checkpoint: Path, cache: Path) -> Vectors:
    """Serve a checkpoint and embed texts."""
    with ServerProcess(checkpoint, "--cache-dir", str(cache)) as server, Client(server.address) as client:
        embedded: Vectors = client.embed(TEXTS)
        return embedded


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Vectors, float]:
    """Return the vectors of an undisturbed server, and the duration of its first start."""
    started = time.monotonic()
    embedded = vectors(checkpoint, tmp_path_factory.mktemp("cache"))
    return embedded, time.monotonic() - started


def test_start_after_a_killed_export_serves_a_complete_bundle(
    record_property: Callable[[str, object], None],
    checkpoint: Path,
    expected: tuple[Vectors, float],
    tmp_path: Path,
) -> None:
    embedded, duration_s = expected
    seed = random.randrange(1 << 16)
    record_property("seed", seed)
    chance = random.Random(seed)
    command = ServerProcess(checkpoint, "--cache-dir", str(tmp_path)).command
    for _ in range(NUM_KILLS):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(duration_s * chance.random())
            process.kill()
    np.testing.assert_array_equal(vectors(checkpoint, tmp_path), embedded, err_msg=f"seed {seed}")
    entry = entry_of(tmp_path, Checkpoint("", checkpoint).exported_from("fp32"))
    assert entry.reason_to_export() == ""
    # A kill between the export and its record leaves a directory of unknown origin, which is moved and kept.
    others = [path for path in tmp_path.iterdir() if path.is_dir() and path != entry.directory]
    assert all(path.name.startswith((".", f"{entry.directory.name}.kept-")) for path in others)


def test_export_to_a_full_disk_leaves_nothing_that_is_used(
    checkpoint: Path,
    expected: tuple[Vectors, float],
    tmp_path: Path,
) -> None:
    command = [*LIMITED, *ServerProcess(checkpoint, "--cache-dir", str(tmp_path)).command]
    failed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert failed.returncode == 2
    assert "File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    np.testing.assert_array_equal(vectors(checkpoint, tmp_path), expected[0])


def test_server_answers_when_its_log_cannot_be_written(minilm_bundle: Path) -> None:
    with (
        attnlens_server(minilm_bundle, "fp32", 0, Path("/dev/full"), "--access-log", "all") as server,
        Client(server.address) as client,
    ):
        for _ in range(20):
            assert client.embed(["hello"]).shape == (1, 384)


def test_killed_server_starts_again_at_the_same_socket(minilm_bundle: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/attnlens.sock"
    chance = random.Random(0)
    found = []
    for _ in range(3):
        with ServerProcess(minilm_bundle, "--address", address) as server:
            with Client(server.address) as client:
                found.append(client.embed(TEXTS))
            caller = threading.Thread(target=call_until_failure, args=[server.address])
            caller.start()
            time.sleep(0.3 * chance.random())
            server.process.kill()
            server.process.wait()
            caller.join()
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def call_until_failure(address: str) -> None:
    with suppress(AttnlensError), Client(address, max_attempts=1) as client:
        while True:
            client.encode(["word " * 100], attention=AttentionQuery())
