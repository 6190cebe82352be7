"""Ray Data and Ray Serve on a local cluster: each row once, answers and errors of a server.

The Python code and the Serve config file are those of docs/scaling.md.
"""

import hashlib
import http.client
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

import attnlens_server
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.error_pb2 import ErrorDetails
from attnlens_client import Client, InputTooLongError
from pages.blocks import blocks_of
from served import ServerProcess

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore"),  # Ray itself warns
]

KEY = "secret"
ROWS, ROWS_PER_TASK = 640, 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start a cluster with processes of its own. Its 6 CPUs run 4 workers and 2 other tasks."""
    import ray  # noqa: PLC0415 - takes seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(num_cpus=6, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def killing_filesystem(marker: Path) -> Any:
    """Return a file system that kills the first process that writes, once it has written a part."""
    import pyarrow.fs as pafs  # noqa: PLC0415 - only where Ray is installed
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    class Handler(pafs.FSSpecHandler):  # type: ignore[misc]
        def open_output_stream(self, path: str, metadata: Any) -> Any:
            if not marker.exists():
                marker.touch()
                Path(path).write_bytes(b"PAR1 a part")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().open_output_stream(path, metadata)

    return pafs.PyFileSystem(Handler(LocalFileSystem()))


def running_workers() -> list[int]:
    """Return the processes below this one that embed texts right now."""
    parents, titles = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2]
            titles[pid] = (stat.parent / "cmdline").read_text()
        except OSError:  # the process has ended
            continue
        parents[pid] = int(rest.split()[1])

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    name = "ray::MapWorker(MapBatches(Embedder)).submit"
    return [pid for pid, title in titles.items() if title.startswith(name) and is_ours(pid)]


@pytest.mark.usefixtures("cluster")
def test_each_row_is_written_once_though_a_worker_and_a_writer_are_killed(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    import pyarrow as pa  # noqa: PLC0415 - only where Ray is installed
    import pyarrow.parquet as pq  # noqa: PLC0415

    texts = [f"text {row} " + "word " * (row % 40) for row in range(ROWS)]
    table = pa.table(
        {"id": range(ROWS), "text": [text if row != 7 else None for row, text in enumerate(texts)]}
    )
    pq.write_table(table, tmp_path / "texts.parquet")
    output, marker = tmp_path / "vectors", tmp_path / "killed"
    written_at_kill: list[int] = []

    def kill() -> None:
        while not marker.exists() or not (running := running_workers()):
            time.sleep(0.02)
        os.kill(running[0], signal.SIGKILL)
        written_at_kill.append(len(list(output.iterdir())))

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    [code] = [block.code for block in blocks_of("docs/scaling.md") if block.form == "python"]
    changes = {
        "/data/texts": str(tmp_path / "texts.parquet"),
        "/data/vectors": str(output),
        "/models/minilm": str(minilm_bundle),
        "=4096": f"={ROWS_PER_TASK}",
        "SaveMode.OVERWRITE": "SaveMode.OVERWRITE, filesystem=filesystem",
    }
    for shown, used in changes.items():
        assert shown in code
        code = code.replace(shown, used)
    exec(code, {"filesystem": killing_filesystem(marker)})

    assert written_at_kill[0] < ROWS // ROWS_PER_TASK == len(list(output.iterdir()))
    result = pq.read_table(output).sort_by("id")
    assert result["id"].to_pylist() == list(range(ROWS))
    assert result["text"].to_pylist() == table["text"].to_pylist()
    assert result["embedding"][7].as_py() is None
    assert result.schema.field("embedding").type == pa.list_(pa.float32(), 384)
    with attnlens_server.local(minilm_bundle, threads=1) as model:
        expected = model.embed(texts[:7] + texts[8:])
    actual = result["embedding"].combine_chunks().drop_null().flatten().to_numpy().reshape(-1, 384)
    np.testing.assert_array_equal(actual, expected)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"tester sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def serve_ports(cluster: None, minilm_bundle: Path, keys: Path) -> Iterator[tuple[int, int]]:
    """Serve two replicas with the config file of the page. Return the ports for gRPC and HTTP."""
    del cluster
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415

    [code] = [block.code for block in blocks_of("docs/scaling.md") if block.form == "yaml"]
    config = yaml.safe_load(code)
    ServeDeploySchema.model_validate(config)
    ports = free_port(), free_port()
    serve.start(
        grpc_options=config["grpc_options"] | {"port": ports[0]},
        http_options=config["http_options"] | {"host": "127.0.0.1", "port": ports[1]},
    )
    [application] = config["applications"]
    changes = {"bundle": str(minilm_bundle), "num_cpus": 1, "api_keys": str(keys)}
    build = pkgutil.resolve_name(application["import_path"])
    serve.run(build(application["args"] | changes | {"min_replicas": 2, "max_replicas": 2}))
    yield ports
    serve.shutdown()


@pytest.fixture(scope="module")
def plain_ports(minilm_bundle: Path, keys: Path) -> Iterator[tuple[int, int]]:
    """A server with the same settings. Return its ports for gRPC and HTTP."""
    options = ("--threads", "1", "--http-port", "0", "--api-keys", str(keys))
    with ServerProcess(minilm_bundle, *options) as server:
        yield int(server.address.rpartition(":")[2]), int(server.http_url().rstrip("/").rpartition(":")[2])


def test_replicas_return_the_vectors_and_streams_of_a_server(
    serve_ports: tuple[int, int], plain_ports: tuple[int, int]
) -> None:
    texts = [f"text {number}" for number in range(300)]
    with (
        Client(f"127.0.0.1:{serve_ports[0]}", api_key=KEY) as replicas,
        Client(f"127.0.0.1:{plain_ports[0]}", api_key=KEY) as plain,
    ):
        np.testing.assert_array_equal(replicas.embed(texts), plain.embed(texts))
        for ours, theirs in zip(
            replicas.encode_stream(texts[:5]), plain.encode_stream(texts[:5]), strict=True
        ):
            np.testing.assert_array_equal(ours.last_hidden_state, theirs.last_hidden_state)
        with pytest.raises(InputTooLongError) as error:
            replicas.embed(["short", "word " * 300])
        assert (error.value.text_index, error.value.num_tokens) == (1, 302)


def status(port: int, method: str, request: bytes, key: str = KEY) -> tuple[Any, ...]:
    """Return code, message, names of the trailers except Serve's, and details of a failed call."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        is_stream = method == "EncodeStream"
        kind = channel.unary_stream if is_stream else channel.unary_unary
        call: Any = kind(f"/attnlens.v1.EncoderService/{method}")
        options: Any = {"timeout": 60, "metadata": (("authorization", f"Bearer {key}"),)}
        with pytest.raises(grpc.RpcError) as failure:
            list(call(request, **options))
    error: Any = failure.value
    trailers = {} if is_stream else dict(error.trailing_metadata())
    details = ErrorDetails.FromString(trailers.get("attnlens-error-bin", b""))
    return error.code(), error.details(), trailers.keys() - {"request_id"}, details


LONG = pb.Input(text="word " * 300)


@pytest.mark.parametrize(
    ("method", "request_bytes", "key"),
    [
        ("Embed", pb.EmbedRequest(inputs=[LONG]).SerializeToString(), KEY),
        ("Encode", pb.EncodeRequest(inputs=[LONG, LONG], model="other").SerializeToString(), KEY),
        ("Tokenize", b"\xff\xff", KEY),
        ("GetModel", b"", "wrong"),
        ("EncodeStream", pb.EncodeStreamRequest(inputs=[LONG]).SerializeToString(), KEY),
    ],
)
def test_errors_are_those_of_a_server(
    serve_ports: tuple[int, int], plain_ports: tuple[int, int], method: str, request_bytes: bytes, key: str
) -> None:
    """Serve does not transmit the trailers of a failed stream."""
    ours, theirs = (status(port, method, request_bytes, key) for port, _ in (serve_ports, plain_ports))
    assert ours == theirs
    assert method == "EncodeStream" or {"attnlens-error-bin", "grpc-status-details-bin"} <= theirs[2]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", b'{"input": ["It rained.", "It was wet."]}', 200),
        ("/v1/embeddings", b'{"input": []}', 400),
        ("/v1/attnlens/embed", b'{"inputs": [{"text": "a"}], "pooling": "all"}', 400),
    ],
)
def test_http_responses_are_those_of_a_server(
    serve_ports: tuple[int, int], plain_ports: tuple[int, int], path: str, body: bytes, expected: int
) -> None:
    responses = []
    for _, port in (serve_ports, plain_ports):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST", path, body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        )
        response = connection.getresponse()
        responses.append((response.status, response.read()))
        connection.close()
    assert responses[0] == responses[1]
    assert responses[0][0] == expected
