"""Table columns as texts, with fakes of the relevant interfaces of those libraries."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attnlens_client.core import requests


class StringScalar:
    """Fake pyarrow scalar."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def as_py(self) -> Any:
        return self._value


class ChunkedArray:
    """Fake pyarrow column: iteration yields scalars."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[StringScalar]:
        return map(StringScalar, self._values)


class Table:
    """Fake pyarrow table, whose `columns` are arrays."""

    column_names = ("text",)

    @property
    def columns(self) -> list[ChunkedArray]:
        raise AssertionError("a lazy table would be computed")

    def __iter__(self) -> Iterator[ChunkedArray]:
        return iter([ChunkedArray("a")])


class Dataset:
    """Fake dataset: iteration yields rows."""

    column_names = ("text",)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"text": "a"}])


@pytest.mark.parametrize(
    "column",
    [
        ChunkedArray("a", "é"),
        np.array(["a", "é"]),
        np.array(["a", "é"], dtype=object),
        np.array(["a", "é"], dtype=np.dtypes.StringDType()),
        np.ma.masked_array(["a", "é"]),
    ],
)
def test_column_is_a_list_of_texts(column: Any) -> None:
    assert [message.text for message in requests.inputs(column)] == ["a", "é"]


def test_column_of_lists_is_token_ids() -> None:
    for column in (ChunkedArray([101, 102]), np.array([[101, 102]])):
        [text] = requests.inputs(column)  # type: ignore[arg-type]
        assert list(text.token_ids.input_ids) == [101, 102]


@pytest.mark.parametrize(
    "column",
    [
        ChunkedArray("a", None),
        np.array(["a", None], dtype=object),
        np.array(["a", np.nan], dtype=object),
        np.array(["a", np.nan], dtype=np.dtypes.StringDType(na_object=np.nan)),
        np.ma.masked_array(["a", "b"], mask=[False, True]),
    ],
)
def test_missing_value_is_reported_with_its_row(column: Any) -> None:
    with pytest.raises(TypeError, match=r"^texts\[1\] is a missing value"):
        requests.inputs(column)


@pytest.mark.parametrize("table", [Table(), Dataset()])
def test_table_is_rejected_with_the_remedy(table: Any) -> None:
    with pytest.raises(TypeError, match=r"use one of its columns, such as df\['text'\]"):
        requests.inputs(table)
