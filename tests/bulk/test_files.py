"""Files that a run opens: kinds of files, links, paths in data, formats by suffix, and limits."""

import gzip
import json
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnlens_bulk import InputError, OutputError, RunOptions, embed_files
from attnlens_bulk.files import find_files
from attnlens_bulk.reading import RowSequence
from attnlens_bulk.storage import Storage
from attnlens_server.in_process import Local


def _texts(path: Path | str, max_line_bytes: int = 1000, **options: Any) -> tuple[list[Any], dict[int, str]]:
    rows = RowSequence(find_files([str(path)]), ["text"], ["text"], max_line_bytes=max_line_bytes, **options)
    try:
        read, _ = rows.read(100)
    finally:
        rows.close()
    return read.table["text"].to_pylist(), read.problems


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "named pipe": os.mkfifo,
    "socket": _make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("given", ["{}/data/a.jsonl", "{}/data", "{}/data/*.jsonl"])
def test_input_that_is_not_a_regular_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.jsonl"
    SPECIAL[kind](path)
    if kind == "directory":
        with pytest.raises(InputError, match=r"contains no files that end in|no file matches"):
            find_files([given.format(tmp_path)])
        return
    with pytest.raises(
        InputError, match=rf"^{path} cannot be read: a {kind} is not a regular file\. Use a file"
    ):
        find_files([given.format(tmp_path)])


@pytest.mark.parametrize("name", ["run.json", "records/part-000000.json", "parts/part-000000.parquet"])
def test_named_pipe_in_the_output_is_refused(tmp_path: Path, model: Local, name: str) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    run = tmp_path / "run"
    embed_files([str(tmp_path / "a.txt")], str(run), [model])
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(OutputError, match="cannot be read: a named pipe is not a regular file"):
        embed_files([str(tmp_path / "a.txt")], str(run), [model])


@pytest.mark.parametrize(
    "name", ["../secret.arrow", "/etc/passwd", "a/../../secret.arrow", "..", "", "..\\a"]
)
def test_path_in_a_data_set_stays_below_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.arrow").write_bytes(b"secret")
    data = tmp_path / "data"
    data.mkdir()
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(InputError, match=rf"cannot be read: .* is not a path below {data}"):
        find_files([str(data)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"_data_files": {}}'),
        ("state.json", '{"_data_files": ["a"]}'),
        ("state.json", '{"_data_files": [{}]}'),
        ("state.json", '{"_data_files": [], "_indices_data_files": 5}'),
        ("state.json", "[" * 100_000),
        ("dataset_dict.json", "5"),
        ("dataset_dict.json", '{"splits": "train"}'),
        ("dataset_dict.json", '{"splits": [5]}'),
    ],
)
def test_damaged_data_set_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=rf"{tmp_path}/{name} is (damaged|not JSON).* Save"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize(
    "name",
    [
        ".shard-0-of-1.lock",
        ".run.json.partial",
        "run.json",
        "parts/.part-000000.parquet.partial",
        "records/.part-000000.json.partial",
        ".complete-0-of-1.json.partial",
        "complete-0-of-1.json",
    ],
)
def test_links_in_the_output_are_never_written_through(
    tmp_path: Path, model: Local, name: str, link: Callable[[Path, Path], None]
) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    (tmp_path / "a.txt").write_text("a\n")
    (run / name).parent.mkdir(parents=True)
    link(run / name, victim)
    try:
        embed_files([str(tmp_path / "a.txt")], str(run), [model])
    except Exception as error:  # noqa: BLE001 - any message for a person is fine
        assert type(error).__module__ == "attnlens_bulk.errors", error
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["parts", "records"])
def test_linked_directory_within_the_output_is_refused(tmp_path: Path, model: Local, name: str) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    with pytest.raises(OutputError, match=rf"run/{name} cannot be written: .*run/{name} is a link"):
        embed_files([str(tmp_path / "a.txt")], str(tmp_path / "run"), [model])
    assert not list((tmp_path / "other").iterdir())


def test_output_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    storage = Storage(str(tmp_path / "run"))
    with storage.locked("a"):
        storage.commit("b", b"content")
    assert storage.read("b") == b"content"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_json_lines_in_a_json_file_are_detected(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}' + ending)
    assert _texts(path) == (["a", "b"], {})
    with pytest.raises(InputError, match="contains no files that end in"):
        find_files([str(tmp_path)])  # files such as config.json are no data


@pytest.mark.parametrize(
    "content",
    ['[{"text": "a"}]', '[\n{"text": "a"}\n]', '{\n "text": "a"\n}', '\n[{"text": "a"},\n{}]', '"a"\n'],
)
def test_json_document_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"{path} is not JSON lines: write one object per line"):
        _texts(path)


@pytest.mark.parametrize("name", ["part-00000", "a.parquet.bak", "a.xlsx"])
def test_binary_file_with_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / name)
    with pytest.raises(InputError, match=rf"{tmp_path / name} is not a text file: set the input format"):
        _texts(tmp_path / name)


def test_long_lines_are_bad_rows_of_bounded_size(tmp_path: Path) -> None:
    long = "x" * 2_000
    (tmp_path / "a.txt").write_text(f"a\n{long}\nb\n{'y' * 1000}\n{long}")
    texts, problems = _texts(tmp_path / "a.txt")
    assert texts == ["a", None, "b", "y" * 1000, None]
    assert problems == dict.fromkeys((1, 4), "the line has more than 1000 bytes")
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "{long}"}}\n{{"text": "b"}}\n')
    assert _texts(tmp_path / "a.jsonl") == (["a", None, "b"], {1: "the line has more than 1000 bytes"})


@pytest.mark.parametrize("record", ["a," + "x" * 2_000, 'a,"' + "x\n" * 2_000, '"' + "x" * 2_000])
def test_long_record_of_csv_is_refused(tmp_path: Path, record: str) -> None:
    (tmp_path / "a.csv").write_text(f"text,b\n{record}")
    with pytest.raises(
        InputError, match=r"a.csv has a record of more than 1000 bytes before line \d+: close"
    ):
        _texts(tmp_path / "a.csv")


def test_records_of_csv_may_have_the_size_of_the_limit_each(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + ('"' + "x\n" * 400 + '"\n') * 50)
    assert _texts(tmp_path / "a.csv") == (["x\n" * 400] * 50, {})


def test_memory_of_a_compressed_line_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * (96 << 20), 1))
    tracemalloc.start()
    try:
        assert _texts(tmp_path / "a.txt.gz", 1 << 20)[1] == {0: f"the line has more than {1 << 20} bytes"}
        assert tracemalloc.get_traced_memory()[1] < 64 << 20  # also of imports
    finally:
        tracemalloc.stop()


def test_long_texts_are_not_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n" + "x" * 11 + "\n" + "y" * 10 + "\n")
    texts, problems = _texts(tmp_path / "a.txt", max_text_bytes=10)
    assert (texts, problems) == (["a", None, "y" * 10], {1: "the text has 11 bytes, but the limit is 10"})


def test_compression_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("fsspec").utils.compressions, "zst", raising=False)
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(
        InputError, match=r"a.txt.zst needs a package for its compression: `pip install zstand"
    ):
        _texts(tmp_path / "a.txt.zst")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content = b'{"text": "a"}\n'

    def do_HEAD(self) -> None:
        self._start()

    def do_GET(self) -> None:
        self._start()
        if self.path.startswith("/sized"):
            self.wfile.write(self.content)
        else:
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(self.content), self.content))

    def _start(self) -> None:
        self.send_response(200)
        is_sized = self.path.startswith("/sized")
        name, value = (
            ("Content-Length", str(len(self.content))) if is_sized else ("Transfer-Encoding", "chunked")
        )
        self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def _http_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_http_source_needs_a_size(tmp_path: Path, model: Local) -> None:
    pytest.importorskip("aiohttp")
    with _http_server() as url:
        report = embed_files([f"{url}/sized.jsonl"], str(tmp_path / "a"), [model], RunOptions())
        assert report.num_rows == 1
        with pytest.raises(
            InputError, match=r"chunked.jsonl has no known size, since the server sends none: dow"
        ):
            embed_files([f"{url}/chunked.jsonl"], str(tmp_path / "b"), [model], RunOptions())
