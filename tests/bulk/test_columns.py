"""Columns of every Arrow type: each output format contains their values, or names the column and its type."""

import base64
import datetime as dt
import io
import json
import math
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from attnlens_bulk import InputError
from attnlens_bulk.files import find_files
from attnlens_bulk.formats import OutputFormat, check_columns, encode_part
from attnlens_bulk.parts import Part, make_part
from attnlens_bulk.reading import RowSequence

UUID = bytes(range(16))
ZONE = pa.timestamp("us", "Europe/Zurich")
DAY = dt.date(2026, 2, 3)
VALUES: list[tuple[Any, list[Any]]] = [
    (pa.null(), [None]),
    (pa.bool_(), [True, False]),
    (pa.int8(), [-128, 127]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.int64(), [-(2**63), 2**63 - 1]),
    (pa.float16(), [np.float16(0.5)]),
    (pa.float32(), [0.5, math.inf]),
    (pa.float64(), [0.1, math.nan, -math.inf]),
    (pa.string(), ["", "東京 😀", '"\n']),
    (pa.large_string(), ["long"]),
    (pa.string_view(), ["short", "a view of more than twelve bytes"]),
    (pa.binary(), [b"", b"\xff\x00"]),
    (pa.large_binary(), [b"\xff"]),
    (pa.binary_view(), [b"\xfe", b"\xff" * 20]),
    (pa.binary(16), [UUID]),
    (pa.decimal128(20, 3), [Decimal("-1.250")]),
    (pa.decimal256(60, 3), [Decimal("1.250")]),
    (pa.decimal32(5, 2), [Decimal("1.25")]),
    (pa.decimal128(5, -2), [Decimal(500)]),
    (pa.date32(), [DAY]),
    (pa.date64(), [DAY]),
    (pa.time32("s"), [dt.time(1, 2, 3)]),
    (pa.time64("ns"), [dt.time(1, 2, 3, 4)]),
    (pa.timestamp("s"), [dt.datetime(2026, 2, 3, 4, 5, 6)]),  # noqa: DTZ001 - a type without a zone
    (pa.timestamp("ns"), [5, 2**62]),
    (ZONE, [0, 10**15]),
    (pa.duration("ns"), [5, -(10**10)]),
    (pa.month_day_nano_interval(), [(1, 2, 3)]),
    (pa.struct([]), [{}]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b"]),
    (pa.run_end_encoded(pa.int32(), pa.string()), ["a", "a"]),
    (pa.list_(pa.int32(), 0), [[]]),
]


@st.composite
def _typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """Draw a type, and a strategy for its values."""
    container = draw(st.sampled_from(["leaf", "list", "view", "large", "fixed", "struct", "map"]))
    if depth == 0 or container == "leaf":
        kind, values = draw(st.sampled_from(VALUES))
        return kind, st.none() | st.sampled_from(values)
    inner, values = draw(_typed_values(depth - 1))
    if container == "struct":
        names = draw(st.sampled_from([["a"], ["a", "b"]]))
        return pa.struct([(name, inner) for name in names]), st.none() | st.fixed_dictionaries(
            dict.fromkeys(names, values)
        )
    if container == "map":
        pairs = st.lists(st.tuples(st.sampled_from(["x", "y"]), values), max_size=2)
        return pa.map_(pa.string(), inner), st.none() | pairs
    if container == "fixed":
        return pa.list_(inner, 2), st.none() | st.lists(values, min_size=2, max_size=2)
    create = {"list": pa.list_, "view": pa.list_view, "large": pa.large_list}[container]
    return create(inner), st.none() | st.lists(values, max_size=3)


@st.composite
def _columns(draw: st.DrawFn) -> Any:
    """Draw a column of six rows, often a slice of a longer one."""
    kind, values = draw(_typed_values())
    start = draw(st.integers(0, 3))
    rows = draw(st.lists(values, min_size=6 + start, max_size=6 + start))
    try:
        column = pa.array(rows, kind).slice(start)
        column.validate(full=True)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # pyarrow cannot create such arrays
        reject()
    return column


def _part(path: Path, output_format: OutputFormat) -> Part:
    """Read a file with the kept column `c`, and return its part with vectors."""
    rows = RowSequence(find_files([str(path)]), ["text", "c"], ["text"])
    try:
        check_columns(output_format, rows.types(), {"c": "c"})
        read, origins = rows.read(100)
    finally:
        rows.close()
    options: dict[str, Any] = {"text_columns": ["text"], "kept": {"c": "c"}, "max_text_bytes": 0}
    part = make_part(0, 0, read, origins, empty="embed", fractions=(0.0, 1.0), **options)
    part.vectors[:] = [np.zeros(2, np.float32)] * len(part.texts)
    return part


def _written(path: Path, output_format: OutputFormat) -> list[Any]:
    """Return the column `c` of the output of a file."""
    columns, vectors = _part(path, output_format).result(np.zeros(2, np.float32))
    content = encode_part(output_format, columns, vectors, {})
    if output_format == "jsonl":
        lines = bytes(content).decode().splitlines()
        return [json.loads(line, parse_constant=pytest.fail)["c"] for line in lines]
    source = pa.BufferReader(content)
    table = pa.ipc.open_file(source).read_all() if output_format == "arrow" else pq.read_table(source)
    return list(table["c"].to_pylist())


def _save(path: Path, column: Any) -> None:
    table = pa.table({"text": [f"text {index}" for index in range(len(column))], "c": column})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


@given(_columns(), st.sampled_from([name for name in get_args(OutputFormat) if name != "npy"]))
@settings(max_examples=100, deadline=None)
def test_any_type_is_written_or_refused_by_name(column: Any, output_format: OutputFormat) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.arrow")
        _save(path, column)
        try:
            written = _written(path, output_format)
        except InputError as error:
            assert "the column 'c'" in str(error)
            assert "cannot contain" in str(error)
            return
    if output_format == "jsonl":
        assert _form(written) == _form(column.to_pylist())
    else:
        assert repr(written) == repr(column.to_pylist())


def _form(value: Any) -> Any:
    """Return the lists, objects and nulls of a value."""
    if isinstance(value, dict):
        return {name: _form(member) for name, member in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return [_form(element) for element in value]
    is_null = value is None or (isinstance(value, float | np.floating) and not math.isfinite(value))
    return None if is_null else "value"


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1.5, math.nan, math.inf]), [1.5, None, None]),
        (pa.array([[math.nan, 1.0], None]), [[None, 1.0], None]),
        (pa.array([b"\xff\x00", None]), [base64.b64encode(b"\xff\x00").decode(), None]),
        (pa.array([b"view"], pa.binary_view()), [base64.b64encode(b"view").decode()]),
        (
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([UUID], pa.binary(16))),
            ["00010203-0405-0607-0809-0a0b0c0d0e0f"],
        ),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([5], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000005"]),
        (pa.array([0], ZONE), ["1970-01-01 01:00:00.000000+0100"]),
        (pa.array([1500], pa.duration("ms")), [1.5]),
        (pa.array([[("x", b"a")], None], pa.map_(pa.string(), pa.binary())), [[["x", "YQ=="]], None]),
        (pa.array([{"a": None}, {}, None], pa.struct([("a", pa.int8())])), [{"a": None}, {"a": None}, None]),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (pa.array(["a", "a"], pa.dictionary(pa.int8(), pa.string())), ["a", "a"]),
    ],
)
def test_json_lines_have_plain_values(tmp_path: Path, column: Any, expected: list[Any]) -> None:
    _save(tmp_path / "a.arrow", column)
    assert _written(tmp_path / "a.arrow", "jsonl") == expected


@pytest.mark.parametrize(
    ("column", "output_format", "kind"),
    [
        (pa.array([{}], pa.struct([])), "parquet", "struct<>"),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "jsonl", "month_day_nano_interval"),
        (pa.array([Decimal(500)], pa.decimal128(5, -2)), "parquet", r"decimal128\(5, -2\)"),
        (pa.StructArray.from_arrays([[1], [2]], ["a", "a"]), "jsonl", "struct<a: int64, a: int64>"),
        (pa.array([0], pa.timestamp("us", "Nowhere/City")), "jsonl", r"timestamp\[us, tz=Nowhere/City\]"),
        (pa.array([10**18], pa.timestamp("s")), "jsonl", r"timestamp\[s\]"),
        (
            pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
            "parquet",
            "sparse_union<0: int64=0>",
        ),
    ],
)
def test_type_without_a_value_in_the_format_is_refused(
    tmp_path: Path, column: Any, output_format: OutputFormat, kind: str
) -> None:
    _save(tmp_path / "a.arrow", column)
    with pytest.raises(InputError, match=rf"^the column 'c' is {kind}, which {output_format} output cannot"):
        _written(tmp_path / "a.arrow", output_format)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_column_may_have_any_type_of_strings(tmp_path: Path, kind: Any, suffix: str) -> None:
    table = pa.table({"text": pa.array(["one", None, "three"], pa.string()).cast(kind)})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    rows = RowSequence(find_files([str(path)]), ["text"], ["text"])
    assert rows.read(9)[0].table["text"].to_pylist() == ["one", None, "three"]


def test_unsigned_ids_of_json_lines_keep_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a", "c": 18329103420363166823}\n{"text": "b", "c": 1}\n{"text": "c", "c": null}\n'
    )
    for output_format in ("parquet", "arrow", "jsonl"):
        assert _written(path, output_format) == [18329103420363166823, 1, None]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["18446744073709551616"], "has integers beyond 64 bits: write them as strings"),
        (["9223372036854775808", "-1"], "has integers beyond 64 bits"),
        (["9223372036854775808", "1.5"], "has values of several types"),
        (["1", '"one"'], "has values of several types"),
    ],
)
def test_json_values_without_a_common_type_are_refused(
    tmp_path: Path, values: list[str], message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "a", "c": {value}}}\n' for value in values))
    with pytest.raises(InputError, match=rf"the column 'c' of {path} {message}"):
        _written(path, "arrow")


@pytest.mark.parametrize(
    ("first", "later", "problem"),
    [
        ("1", "1.5", "'c' is not of type int64"),
        ("{}", '{"b": 1}', "'c' has the key 'b', which none of the first 2 rows has"),
        ('{"a": 1}', "[]", "'c' is not of type struct<a: int64>"),
        ('[{"a": 1}]', '[{"a": 1, "b": 2}]', "'c' has the key 'b', which none of the first 2 rows has"),
        ("1", "9223372036854775808", "'c' is not of type int64"),
    ],
)
def test_json_values_that_do_not_fit_the_first_rows_are_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, later: str, problem: str
) -> None:
    monkeypatch.setattr("attnlens_bulk.reading.TYPED_ROWS", 2)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "a", "c": {value}}}\n' for value in (first, first, later)))
    assert _part(path, "arrow").problems == {2: problem}


def test_repeated_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,c,text\na,b,c\n")
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "c", "c"]), tmp_path / "b.parquet")
    for name, column in (("a.csv", "text"), ("b.parquet", "c")):
        with pytest.raises(InputError, match=rf"{name} has 2 columns '{column}': give them different names"):
            _part(tmp_path / name, "arrow")
    (tmp_path / "c.jsonl").write_text(
        '{"text": "a", "text": "b", "c": 1}\n{"text": "a", "c": {"x": 1, "x": 2}}\n'
    )
    assert _part(tmp_path / "c.jsonl", "arrow").problems == {0: "2 values of 'text'"}


def test_invalid_utf8_within_lists_is_a_problem_of_its_row(tmp_path: Path) -> None:
    column = pa.array([[b"a"], [b"\xff"], [b"b"]], pa.list_(pa.binary())).view(pa.list_(pa.string()))
    _save(tmp_path / "a.arrow", column)
    part = _part(tmp_path / "a.arrow", "jsonl")
    assert part.problems == {1: "not UTF-8"}
    columns, _ = part.result(np.zeros(2, np.float32))
    assert columns["c"].to_pylist() == [["a"], ["b"]]


def test_offsets_beyond_the_data_are_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    table = pa.table({"text": ["a" * 8, "b" * 8], "c": [1, 2]})
    with pa.ipc.new_file(content, table.schema) as writer:
        writer.write_table(table)
    offsets = np.array([0, 8, 16], np.int32).tobytes()
    damaged = content.getvalue().replace(offsets, np.array([0, 8, 1 << 30], np.int32).tobytes())
    assert damaged != content.getvalue()
    (tmp_path / "a.arrow").write_bytes(damaged)
    with pytest.raises(InputError, match=r"a.arrow cannot be read"):
        _part(tmp_path / "a.arrow", "jsonl")
