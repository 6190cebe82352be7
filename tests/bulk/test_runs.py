"""Runs in this process: parts, rows, policies and resuming."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bulk_runs
from attnlens_bulk import (
    InputError,
    OutputError,
    ResumeError,
    RowError,
    RunOptions,
    embed_files,
    estimate,
)
from attnlens_client import Client
from attnlens_server.in_process import Local
from served import ServerProcess

TEXTS = ["It rained.", "", "  ", "It rained.", "Someone plays an instrument. " * 9, "東京 😀", "a"]


def _source(tmp_path: Path, texts: Sequence[str | None] = TEXTS) -> Path:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts, "name": [f"n{index}" for index in range(len(texts))]}), path)
    return path


def test_rows_keep_their_order_and_columns_over_parts(tmp_path: Path, model: Local) -> None:
    options = RunOptions(rows_per_part=3, id_column="name", keep=("text",))
    report = embed_files([str(_source(tmp_path))], str(tmp_path / "run"), [model], options)
    assert (report.num_rows, report.num_parts, report.num_written, report.num_rejected) == (7, 3, 3, 0)
    table = pq.read_table(tmp_path / "run" / "parts")
    assert table["row"].to_pylist() == list(range(7))
    assert table["id"].to_pylist() == [f"n{index}" for index in range(7)]
    assert table["text"].to_pylist() == TEXTS
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 384)
    np.testing.assert_array_equal(bulk_runs.vectors_of(tmp_path / "run"), model.embed(TEXTS))
    assert json.loads((tmp_path / "run" / "complete-0-of-1.json").read_bytes())["parts"] == 3


def test_equal_texts_of_a_part_are_computed_once(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path, ["It rained."] * 40 + ["a"] * 40)
    report = embed_files([str(source)], str(tmp_path / "run"), [model], RunOptions(rows_per_part=60))
    assert report.tally.texts == 3  # two in the first part, one in the second
    expected = model.embed(["It rained."] * 40 + ["a"] * 40)
    np.testing.assert_array_equal(bulk_runs.vectors_of(tmp_path / "run"), expected)


def test_shards_share_a_directory_and_write_the_parts_of_one_run(tmp_path: Path, model: Local) -> None:
    source = str(_source(tmp_path))
    embed_files([source], str(tmp_path / "one"), [model], RunOptions(rows_per_part=2))
    for shard in range(3):
        options = RunOptions(rows_per_part=2, shard=(shard, 3))
        embed_files([source], str(tmp_path / "three"), [model], options)
    one, three = (bulk_runs.contents(tmp_path / name) for name in ("one", "three"))
    assert {name: data for name, data in three.items() if not name.startswith("complete")} == {
        name: data for name, data in one.items() if not name.startswith("complete")
    }
    assert sum(name.startswith("complete") for name in three) == 3


@pytest.mark.parametrize("embedding_type", ["float", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("output_format", ["parquet", "arrow", "npy", "jsonl"])
def test_formats_contain_the_vectors_of_the_model(
    tmp_path: Path, model: Local, output_format: Any, embedding_type: Any
) -> None:
    embedding = {"embedding_type": embedding_type}
    if embedding_type in ("int8", "uint8"):
        embedding["ranges"] = np.array([[-0.2] * 384, [0.2] * 384], np.float32)
    options = RunOptions(output_format=output_format, embedding=embedding)
    for _ in range(2):  # a complete run accepts the same call
        embed_files([str(_source(tmp_path))], str(tmp_path / "run"), [model], options)
    expected = model.embed(TEXTS, **embedding)
    path = tmp_path / "run" / "parts" / f"part-000000.{output_format}"
    match output_format:
        case "npy":
            written = np.load(path)
        case "jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            assert [row["row"] for row in rows] == list(range(7))
            written = np.array([row["embedding"] for row in rows], expected.dtype)
        case _:
            table = pa.ipc.open_file(path).read_all() if output_format == "arrow" else pq.read_table(path)
            written = np.asarray(table["embedding"].combine_chunks().flatten()).reshape(len(table), -1)
    assert written.dtype == expected.dtype
    np.testing.assert_array_equal(written, expected)


def test_float16_vectors_stay_float16_in_parquet(tmp_path: Path, model: Local) -> None:
    options = RunOptions(embedding={"dtype": "float16"})
    embed_files([str(_source(tmp_path))], str(tmp_path / "run"), [model], options)
    written = bulk_runs.vectors_of(tmp_path / "run")
    assert written.dtype == np.float16
    np.testing.assert_array_equal(written, model.embed(TEXTS, dtype="float16"))


BAD = ["fine", None, "word " * 300, "x" * (1 << 21), "fine too"]


def test_first_bad_row_ends_the_run_and_is_named(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path, BAD)
    with pytest.raises(RowError, match=rf"^row 1 of {source}: no text. Correct it, or skip bad rows"):
        embed_files([str(source)], str(tmp_path / "run"), [model])
    assert set(bulk_runs.contents(tmp_path / "run")) == {"run.json"}


def test_long_text_ends_the_run_unless_it_is_truncated(tmp_path: Path, model: Local) -> None:
    source = str(_source(tmp_path, ["fine", "word " * 300]))
    with pytest.raises(RowError, match=r"row 1 of .*: the text has 302 tokens, but the limit is 256"):
        embed_files([source], str(tmp_path / "run"), [model])
    embed_files([source], str(tmp_path / "cut"), [model], RunOptions(embedding={"truncate": True}))
    expected = model.embed(["fine", "word " * 300], truncate=True)
    np.testing.assert_array_equal(bulk_runs.vectors_of(tmp_path / "cut"), expected)


def test_skipped_rows_are_reported_and_the_others_keep_their_numbers(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path, BAD)
    options = RunOptions(skip_bad_rows=True, rows_per_part=4)
    report = embed_files([str(source)], str(tmp_path / "run"), [model], options)
    assert (report.num_rows, report.num_rejected) == (5, 3)
    assert pq.read_table(tmp_path / "run" / "parts")["row"].to_pylist() == [0, 4]
    lines = (tmp_path / "run" / "rejected-000000.jsonl").read_text("utf-8").splitlines()
    rejected = [json.loads(line) for line in lines]
    assert [(row["row"], row["file"], row["file_row"]) for row in rejected] == [
        (index, str(source), index) for index in (1, 2, 3)
    ]
    assert [row["reason"].split(",")[0] for row in rejected] == [
        "no text",
        "the text has 302 tokens",
        "the text has 2097152 bytes",
    ]


def test_null_id_is_a_bad_row(tmp_path: Path, model: Local) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "key": ["k", None]}), path)
    with pytest.raises(RowError, match=r"row 1 of .*: no value in the column 'key'"):
        embed_files([str(path)], str(tmp_path / "run"), [model], RunOptions(id_column="key"))


def _change_size(source: Path) -> None:
    pq.write_table(pa.table({"text": ["other"], "name": ["n"]}), source)


def _change_bytes(source: Path) -> None:
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    source.write_bytes(content)


@pytest.mark.parametrize("change", [_change_size, _change_bytes])
def test_changed_input_is_refused_by_name_and_nothing_is_lost(
    tmp_path: Path, model: Local, change: Any
) -> None:
    source = _source(tmp_path)
    embed_files([str(source)], str(tmp_path / "run"), [model])
    before = bulk_runs.contents(tmp_path / "run")
    change(source)
    with pytest.raises(ResumeError, match=rf"^the input {source} has changed: its (size_bytes|sha256) was "):
        embed_files([str(source)], str(tmp_path / "run"), [model])
    assert bulk_runs.contents(tmp_path / "run") == before


def test_large_file_with_another_time_of_change_is_refused(
    tmp_path: Path, model: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_bulk.files.FULL_HASH_BYTES", 16)
    monkeypatch.setattr("attnlens_bulk.files.END_HASH_BYTES", 8)
    source = _source(tmp_path)
    embed_files([str(source)], str(tmp_path / "run"), [model])
    embed_files([str(source)], str(tmp_path / "run"), [model])
    os.utime(source, (1, 1))
    with pytest.raises(ResumeError, match="may have changed: its time of change was"):
        embed_files([str(source)], str(tmp_path / "run"), [model])


def test_new_missing_and_renamed_inputs_are_refused_by_name(tmp_path: Path, model: Local) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    first, second = directory / "a.txt", directory / "b.txt"
    first.write_text("one\n")
    embed_files([str(directory)], str(tmp_path / "run"), [model])
    second.write_text("two\n")
    with pytest.raises(ResumeError, match=f"the input {second} is new"):
        embed_files([str(directory)], str(tmp_path / "run"), [model])
    first.unlink()
    with pytest.raises(ResumeError, match=f"the input {first} of the run is missing"):
        embed_files([str(directory)], str(tmp_path / "run"), [model])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(rows_per_part=5), "the option rows_per_part was 32768 and is 5"),
        (RunOptions(embedding={"pooling": "cls"}), "the option pooling was 'mean' and is 'cls'"),
        (RunOptions(embedding={"dtype": "float16"}), "the option dtype was 'float32' and is 'float16'"),
    ],
)
def test_changed_option_is_refused_by_name(
    tmp_path: Path, model: Local, options: RunOptions, message: str
) -> None:
    source = str(_source(tmp_path))
    embed_files([source], str(tmp_path / "run"), [model])
    with pytest.raises(ResumeError, match=message):
        embed_files([source], str(tmp_path / "run"), [model], options)


def test_changed_model_is_refused(tmp_path: Path, model: Local) -> None:
    source = str(_source(tmp_path))
    embed_files([source], str(tmp_path / "run"), [model])
    described = tmp_path / "run" / "run.json"
    content = json.loads(described.read_bytes())
    content["model"]["version"] = "0" * 64  # as if another model had written the parts
    described.write_text(json.dumps(content))
    with pytest.raises(ResumeError, match=r"the model's version was '0{64}' and is '[0-9a-f]{64}'"):
        embed_files([source], str(tmp_path / "run"), [model])


def test_bad_row_policy_can_change_between_calls(tmp_path: Path, model: Local) -> None:
    source = str(_source(tmp_path, ["a", "b", None, "c"]))
    with pytest.raises(RowError):
        embed_files([source], str(tmp_path / "run"), [model], RunOptions(rows_per_part=2))
    options = RunOptions(rows_per_part=2, skip_bad_rows=True)
    report = embed_files([source], str(tmp_path / "run"), [model], options)
    assert (report.num_parts, report.num_written, report.num_rejected) == (2, 1, 1)


def test_unreadable_file_ends_the_run_after_the_parts_before_it(tmp_path: Path, model: Local) -> None:
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": [f"text {index}" for index in range(8)]}), first)
    pq.write_table(pa.table({"text": ["last"]}), second)
    whole = second.read_bytes()
    second.write_bytes(whole[:-30])
    options = RunOptions(rows_per_part=4)
    with pytest.raises(InputError, match=rf"^{second} cannot be read: .*\. Repair the file, and repeat"):
        embed_files([str(first), str(second)], str(tmp_path / "run"), [model], options)
    assert len(list((tmp_path / "run" / "parts").iterdir())) == 2


def test_second_process_of_a_shard_is_refused(tmp_path: Path, model: Local) -> None:
    source, run = str(_source(tmp_path)), tmp_path / "run"

    def start_again(_: object) -> None:
        with pytest.raises(OutputError, match=r"another process writes .*run: wait for it"):
            embed_files([source], str(run), [model])
        calls.append(run)

    calls: list[Path] = []
    embed_files([source], str(run), [model], progress=start_again)
    assert calls


def test_output_and_inputs_can_be_in_an_object_store(model: Local) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/in/a.jsonl", b'{"text": "a", "key": "1"}\n{"text": "b", "key": "2"}\n')
    store.pipe_file("/in/b.csv", b"key,text\n3,c\n")
    arguments = (["memory://in"], "memory://out/run/", [model], RunOptions(rows_per_part=2, id_column="key"))
    try:
        embed_files(*arguments)
        names = sorted(store.find("/out/run"))
        assert names == [
            "/out/run/complete-0-of-1.json",
            "/out/run/parts/part-000000.parquet",
            "/out/run/parts/part-000001.parquet",
            "/out/run/records/part-000000.json",
            "/out/run/records/part-000001.json",
            "/out/run/run.json",
        ]
        with store.open(names[2]) as file:
            assert pq.read_table(file).drop_columns("embedding").to_pylist() == [{"row": 2, "id": "3"}]
        store.rm_file(names[1])
        assert embed_files(*arguments).num_written == 1
        assert sorted(store.find("/out/run")) == names
    finally:
        store.rm("/in", recursive=True)
        store.rm("/out", recursive=True)


class UnreachableError(Exception):
    """Error of an object store that is not an OSError, such as those of botocore."""


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("isfile", InputError),
        ("open", InputError),
        ("isdir", InputError),
        ("pipe_file", OutputError),
        ("ls", OutputError),
    ],
)
def test_unreachable_object_store_is_reported(
    monkeypatch: pytest.MonkeyPatch, model: Local, method: str, error: type[Exception]
) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/in/a.jsonl", b'{"text": "a"}\n')
    if error is OutputError:
        store.pipe_file("/out/run/parts/.other", b"")

    def fail(*_: object, **__: object) -> None:
        raise UnreachableError("connection refused")

    given = "memory://in/a.jsonl" if error is OutputError else "memory://in"
    try:
        with monkeypatch.context() as patches:
            patches.setattr(type(store), method, fail)
            with pytest.raises(error, match=r"memory://.* connection refused"):
                embed_files([given], "memory://out/run", [model])
    finally:
        store.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("empty", "rows", "omitted"),
    [
        ("embed", [0, 1, 2, 4], {3: "no text"}),
        ("skip", [0, 4], {1: "the text is empty", 2: "the text is empty", 3: "no text"}),
        ("reject", [0, 4], {1: "the text is empty", 2: "the text is empty", 3: "no text"}),
    ],
)
def test_empty_texts_follow_their_option(
    tmp_path: Path, model: Local, empty: Any, rows: list[int], omitted: dict[int, str]
) -> None:
    source = _source(tmp_path, ["a", "", " \t\n", None, "b"])
    if empty != "skip":
        options = RunOptions(empty=empty)
        with pytest.raises(RowError, match=f"row {min(omitted)} of .*: {omitted[min(omitted)]}"):
            embed_files([str(source)], str(tmp_path / "fails"), [model], options)
    options = RunOptions(empty=empty, skip_bad_rows=empty != "skip")
    report = embed_files([str(source)], str(tmp_path / "run"), [model], options)
    assert (report.num_rows, report.num_rejected) == (5, len(omitted))
    assert report.num_empty == (2 if empty == "embed" else 0)
    assert pq.read_table(tmp_path / "run" / "parts")["row"].to_pylist() == rows
    lines = (tmp_path / "run" / "rejected-000000.jsonl").read_text("utf-8").splitlines()
    assert {row["row"]: row["reason"] for row in map(json.loads, lines)} == omitted


def test_empty_field_of_csv_is_an_empty_text(tmp_path: Path, model: Local) -> None:
    source = tmp_path / "a.csv"
    source.write_text('text,key\na,1\n,2\n"",3\n')
    report = embed_files([str(source)], str(tmp_path / "run"), [model], RunOptions(empty="skip"))
    assert (report.num_rows, report.num_rejected) == (3, 2)


def test_skipped_texts_do_not_hide_bad_rows(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path, ["", "word " * 300])
    with pytest.raises(RowError, match=r"row 1 of .*: the text has 302 tokens"):
        embed_files([str(source)], str(tmp_path / "run"), [model], RunOptions(empty="skip"))


def test_truncated_rows_of_all_calls_are_counted(tmp_path: Path, model: Local) -> None:
    long = "word " * 300
    source = str(_source(tmp_path, [long, "a", long, "b", long + "x", ""]))
    options = RunOptions(rows_per_part=2, embedding={"truncate": True})
    run = tmp_path / "run"
    assert embed_files([source], str(run), [model], options).num_truncated == 3
    (run / "parts" / "part-000002.parquet").unlink()
    report = embed_files([source], str(run), [model], options)
    assert (report.num_written, report.num_truncated, report.num_empty) == (1, 3, 1)
    summary = json.loads((run / "complete-0-of-1.json").read_bytes())
    assert summary == {
        "rows_of_all_shards": 6,
        "rows": 6,
        "parts": 3,
        "rejected_rows": 0,
        "truncated_rows": 3,
        "empty_rows": 1,
    }


def test_shard_reports_its_own_rows(tmp_path: Path, model: Local) -> None:
    source = str(_source(tmp_path, [f"text {index}" for index in range(7)]))
    for _ in range(2):  # computed, and found
        options = RunOptions(rows_per_part=2, shard=(1, 2))
        report = embed_files([source], str(tmp_path / "run"), [model], options)
        assert (report.num_rows, report.num_shard_rows, report.num_parts) == (7, 3, 2)


def test_several_servers_share_the_texts_and_one_may_die(
    tmp_path: Path, model: Local, minilm_bundle: Path, minilm_server: ServerProcess
) -> None:
    source = str(_source(tmp_path, [f"text {index}" for index in range(900)]))
    options = RunOptions(rows_per_part=300, batch_size=16, in_flight=2)
    with ServerProcess(minilm_bundle, "--threads", "1") as second:
        addresses = (minilm_server.address, second.address)
        clients = [Client(address, priority="bulk", timeout_s=2) for address in addresses]

        def kill(_: object) -> None:
            second.process.kill()

        embed_files([source], str(tmp_path / "run"), clients, options, progress=kill)
        for client in clients:
            client.close()
    assert pq.read_table(tmp_path / "run" / "parts")["row"].to_pylist() == list(range(900))
    expected = model.embed([f"text {index}" for index in range(900)])
    assert np.abs(bulk_runs.vectors_of(tmp_path / "run") - expected).max() <= 1e-5


def test_estimate_knows_the_number_of_rows_and_writes_nothing(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path, [f"text {index}" for index in range(600)])
    result = estimate([str(source)], str(tmp_path / "run"), [model], RunOptions(rows_per_part=100))
    assert (result.num_rows, result.num_parts, result.num_files) == (600, 6, 1)
    assert result.output_bytes > 600 * 384 * 4 * 0.8
    assert result.seconds > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": (3, 3)}, r"shard is 3/3: use an index from 0 to 2"),
        ({"rows_per_part": 0}, "rows_per_part is 0: use at least 1"),
        ({"output_format": "npy", "keep": ("name",)}, "which contains embeddings alone"),
        ({"keep": ("row",)}, "keep contains 'row', a column of the output"),
        ({"text_columns": ()}, "text_columns is empty"),
        ({"empty": "drop"}, "empty is 'drop': use one of embed, skip, reject"),
        ({"patience_s": -1.0}, "patience_s is -1.0: use 0 or more seconds"),
        ({"patience_s": float("nan")}, "patience_s is nan"),
        ({"max_line_bytes": 0}, "max_line_bytes is 0: use at least 1"),
        ({"output_format": "csv"}, "output_format is 'csv': use one of parquet, arrow, npy, jsonl"),
    ],
)
def test_invalid_options_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunOptions(**options)
