"""Rows of all input formats, without a model."""

import bz2
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlens_bulk import InputError
from attnlens_bulk.files import find_files
from attnlens_bulk.reading import RowSequence

ROWS: list[dict[str, Any]] = [
    {"text": f'Text "{index}", with\n two lines', "key": index} for index in range(10_000)
]


def _table() -> pa.Table:
    return pa.Table.from_pylist(ROWS)


def _write_csv(path: Path, separator: str = ",") -> None:
    lines = ['"' + row["text"].replace('"', '""') + f'"{separator}{row["key"]}' for row in ROWS]
    path.write_text("\r\n".join([f"text{separator}key", *lines]) + "\r\n", encoding="utf-8-sig", newline="")


def _write_jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")


def _write_ipc(path: Path, *, is_stream: bool) -> None:
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(path, _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=700)


def _write_compressed(path: Path, compress: Callable[[bytes], bytes]) -> None:
    _write_jsonl(path)
    path.write_bytes(compress(path.read_bytes()))


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.csv": _write_csv,
    "a.tsv": lambda path: _write_csv(path, "\t"),
    "a.jsonl": _write_jsonl,
    "a.jsonl.gz": lambda path: _write_compressed(path, gzip.compress),
    "a.jsonl.bz2": lambda path: _write_compressed(path, bz2.compress),
    "a.parquet": lambda path: pq.write_table(_table(), path, row_group_size=3000),
    "a.arrow": lambda path: _write_ipc(path, is_stream=False),
    "b.arrow": lambda path: _write_ipc(path, is_stream=True),
    "a.feather": lambda path: pyarrow.feather.write_feather(_table(), path),
}


def _read(paths: list[str], plan: list[tuple[str, int]]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows that a plan of skips and reads yields, and the final position."""
    rows = RowSequence(find_files(paths), ["text", "key"], ["text"])
    found: list[dict[str, Any]] = []
    try:
        for action, count in plan:
            if action == "skip":
                rows.skip(count)
            else:
                found += rows.read(count)[0].table.to_pylist()
        return found, rows.position
    finally:
        rows.close()


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    found, position = _read([str(tmp_path / name)], [("read", 20_000)])
    assert position == len(ROWS)
    types = (str if name.endswith(("csv", "tsv")) else int, str)
    assert found == [{"text": row["text"], "key": types[0](row["key"])} for row in ROWS]


@pytest.mark.parametrize("name", WRITERS)
def test_skipped_rows_do_not_change_the_others(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    chance = random.Random(name)
    plan = [(chance.choice(["skip", "read"]), chance.randrange(1, 2500)) for _ in range(20)]
    found, _ = _read([str(tmp_path / name)], plan)
    expected, position = [], 0
    for action, count in plan:
        if action == "read":
            expected += [row["text"] for row in ROWS[position : position + count]]
        position += count
    assert [row["text"] for row in found] == expected


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Parquet files with 7, 0, 40 and 12 rows."""
    directory, start = tmp_path_factory.mktemp("numbered"), 0
    for index, size in enumerate((7, 0, 40, 12)):
        keys = list(range(start, start + size))
        table = pa.table(
            {"text": pa.array([str(key) for key in keys], pa.string()), "key": pa.array(keys, pa.int64())}
        )
        pq.write_table(table, directory / f"{index}.parquet", row_group_size=5)
        start += size
    return [str(directory)]


@given(st.lists(st.tuples(st.sampled_from(["skip", "read"]), st.integers(1, 30)), max_size=12))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_are_one_sequence(numbered: list[str], plan: list[tuple[str, int]]) -> None:
    expected, position = [], 0
    for action, count in plan:
        if action == "read":
            expected += list(range(position, min(59, position + count)))
        position = min(59, position + count)
    found, last = _read(numbered, plan)
    assert ([row["key"] for row in found], last) == (expected, position)


def _problems(path: Path, columns: list[str]) -> tuple[list[Any], dict[int, str]]:
    rows = RowSequence(find_files([str(path)]), columns, ["text"])
    read, _ = rows.read(100)
    rows.close()
    return read.table["text"].to_pylist(), read.problems


def test_invalid_lines_are_problems_of_their_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": \n[]\n{"text": 5}\n{"text": "na\xefve"}\n{"text": "\\ud800"}\n{"key": 1}\n'
    )
    texts, problems = _problems(tmp_path / "a.jsonl", ["text"])
    assert texts == ["a", *[None] * 6]
    assert {index: reason.partition(":")[0] for index, reason in problems.items()} == {
        1: "not JSON",
        2: "not a JSON object",
        3: "'text' is not of type string",
        4: "not UTF-8",
        5: "not UTF-8",
    }


def test_invalid_csv_rows_are_problems(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,key\na,1\nb\nc,2,3\n\nna\xefve,4\nd,5\n")
    texts, problems = _problems(tmp_path / "a.csv", ["text"])
    assert texts == ["a", None, None, None, "d"]
    assert problems == {
        1: "1 fields, but the header has 2",
        2: "3 fields, but the header has 2",
        3: "not UTF-8",
    }


def test_invalid_utf8_in_parquet_is_a_problem(tmp_path: Path) -> None:
    invalid = pa.array([b"a", b"na\xefve", b"b"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": invalid}), tmp_path / "a.parquet")
    assert _problems(tmp_path / "a.parquet", ["text"]) == (["a", None, "b"], {1: "not UTF-8"})


def test_lines_are_texts_also_if_they_are_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\n\n  \nna\xefve\nlast")
    assert _problems(tmp_path / "a.txt", ["text"]) == (["a", "", "  ", None, "last"], {3: "not UTF-8"})


def test_datasets_on_disk_are_read_in_the_order_of_their_state(tmp_path: Path) -> None:
    names = ["data-00001.arrow", "data-00000.arrow"]
    for name in names:
        table = pa.table({"text": [name]})
        with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_info.json").write_text("{}")
    rows = RowSequence(find_files([str(tmp_path)]), ["text"], ["text"])
    assert rows.read(9)[0].table["text"].to_pylist() == names
    (tmp_path / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]})
    )
    with pytest.raises(InputError, match="call flatten_indices"):
        find_files([str(tmp_path)])


def test_several_splits_must_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"contains several splits: give one or more of .*/\{train,test\}"):
        find_files([str(tmp_path)])


def test_directories_and_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.csv", "sub/c.jsonl", "_SUCCESS", ".hidden.txt", "sub/_x/d.txt", "image.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    inner = [file.path.removeprefix(f"{tmp_path}/") for file in find_files([str(tmp_path)])]
    assert inner == ["a.csv", "b.txt", "sub/c.jsonl"]
    assert [file.format for file in find_files([f"{tmp_path}/*.csv", f"{tmp_path}/b*"])] == ["csv", "lines"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["{}/none.csv"], "there is no file or directory .*none.csv: correct the name"),
        (["{}/*.csv"], "no file matches .*: correct the pattern"),
        (["{}"], "contains no files that end in .txt, .jsonl"),
        (["{}/a.png", "{}/a.png"], "a.png is given twice"),
        (["nothing://a"], "nothing://a cannot be read: Protocol not known: nothing"),
    ],
)
def test_missing_inputs_are_named(tmp_path: Path, given: list[str], message: str) -> None:
    (tmp_path / "a.png").write_text("")
    with pytest.raises(InputError, match=message):
        find_files([name.format(tmp_path) for name in given])


def test_missing_column_is_named_with_the_existing_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    with pytest.raises(InputError, match=r"a.csv has no column 'text': it has title, body"):
        _problems(tmp_path / "a.csv", ["text"])


def test_columns_of_later_files_must_fit_the_first(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "key": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "key": pa.array([2], pa.int64())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["c"], "key": ["three"]}), tmp_path / "c.parquet")
    rows = RowSequence(find_files([str(tmp_path)]), ["text", "key"], ["text"])
    assert rows.read(2)[0].table["key"].to_pylist() == [1, 2]
    with pytest.raises(InputError, match=r"'key' of .*c.parquet is string, but int32 in the first file"):
        rows.read(1)
    rows.close()


def test_text_column_must_contain_strings(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"'text' of .* is int64, not string: choose another text column"):
        _problems(tmp_path / "a.parquet", ["text"])


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 5000)[:-20])
    with pytest.raises(InputError, match=f"^{path} cannot be read: Compressed file ended"):
        RowSequence(find_files([str(path)]), ["text"], ["text"]).read(9000)
