"""Token vectors: columns, equality with `encode`, policies and invalid options."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bulk_runs
from attnlens_bulk import ResumeError, RowError, RunOptions, embed_files, estimate
from attnlens_client import Client, EncodedText
from attnlens_server.in_process import Local
from served import ServerProcess

TEXTS = ["It rained.", "", "  ", "It rained.", "Someone plays an instrument. " * 9, "東京 😀", "a"]


def _source(tmp_path: Path, texts: Sequence[str | None] = TEXTS) -> str:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    return str(path)


def _rows(run: Path, output_format: str) -> list[dict[str, Any]]:
    path = run / "parts" / f"part-000000.{output_format}"
    if output_format == "jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    table = pa.ipc.open_file(path).read_all() if output_format == "arrow" else pq.read_table(path)
    return list(table.to_pylist())


def _assert_equal(rows: Sequence[dict[str, Any]], texts: Sequence[EncodedText]) -> None:
    assert [row["token_ids"] for row in rows] == [[token.id for token in text.tokens] for text in texts]
    for row, text in zip(rows, texts, strict=True):
        assert text.last_hidden_state is not None
        written = np.array(row["token_vectors"], text.last_hidden_state.dtype)
        np.testing.assert_array_equal(written, text.last_hidden_state)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("output_format", ["parquet", "arrow", "jsonl"])
def test_formats_contain_the_hidden_states_of_encode(
    tmp_path: Path, model: Local, output_format: Any, dtype: Any
) -> None:
    options = RunOptions(vectors="tokens", output_format=output_format, embedding={"dtype": dtype})
    report = embed_files([_source(tmp_path)], str(tmp_path / "run"), [model], options)
    assert (report.num_rows, report.num_parts, report.tally.texts) == (7, 1, 6)  # two texts are equal
    assert embed_files([_source(tmp_path)], str(tmp_path / "run"), [model], options).num_written == 0
    rows = _rows(tmp_path / "run", output_format)
    assert [row["row"] for row in rows] == list(range(7))
    _assert_equal(rows, model.encode(TEXTS, dtype=dtype))


def test_columns_are_lists_of_lists_of_fixed_size(tmp_path: Path, model: Local) -> None:
    options = RunOptions(vectors="tokens", embedding={"dtype": "float16"}, rows_per_part=4)
    embed_files([_source(tmp_path)], str(tmp_path / "run"), [model], options)
    schema = pq.read_schema(tmp_path / "run" / "parts" / "part-000000.parquet")
    assert schema.names == ["row", "token_ids", "token_vectors"]
    assert schema.field("token_ids").type.value_type == pa.int32()
    assert schema.field("token_vectors").type.value_type == pa.list_(pa.float16(), 384)
    described = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert described["options"]["vectors"] == "tokens"
    assert (described["vectors"]["type"], described["vectors"]["columns"]) == ("float16", 384)


def test_repeated_runs_have_equal_bytes_for_any_batch_size(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path)
    for batch_size in (1, 3, 128):
        options = RunOptions(vectors="tokens", rows_per_part=3, batch_size=batch_size)
        embed_files([source], str(tmp_path / str(batch_size)), [model], options)
    one, three, many = (bulk_runs.contents(tmp_path / name) for name in ("1", "3", "128"))
    assert one == three == many


def test_servers_return_the_same_tokens_in_order(
    tmp_path: Path, model: Local, minilm_server: ServerProcess
) -> None:
    texts = [f"Text {number} " + "and more " * (number % 5) for number in range(40)]
    options = RunOptions(vectors="tokens", rows_per_part=16, batch_size=4)
    with Client(minilm_server.address) as one, Client(minilm_server.address) as other:
        embed_files([_source(tmp_path, texts)], str(tmp_path / "run"), [one, other], options)
    rows = pq.read_table(tmp_path / "run" / "parts").to_pylist()
    for row, text in zip(rows, model.encode(texts), strict=True):
        assert row["token_ids"] == [token.id for token in text.tokens]
        assert np.abs(np.array(row["token_vectors"]) - text.last_hidden_state).max() <= 1e-5


def test_bad_rows_follow_the_policy(tmp_path: Path, model: Local) -> None:
    texts = ["fine", None, "word " * 300, "fine too", None]
    source = _source(tmp_path, texts)
    with pytest.raises(RowError, match=r"row 1 of .*: no text"):
        embed_files([source], str(tmp_path / "run"), [model], RunOptions(vectors="tokens"))
    options = RunOptions(vectors="tokens", skip_bad_rows=True, rows_per_part=4)
    assert embed_files([source], str(tmp_path / "run2"), [model], options).num_rejected == 3
    rows = pq.read_table(tmp_path / "run2" / "parts").to_pylist()  # the second part is empty
    assert [row["row"] for row in rows] == [0, 3]
    _assert_equal(rows, model.encode(["fine", "fine too"]))


def test_long_texts_are_truncated_on_request(tmp_path: Path, model: Local) -> None:
    texts = ["fine", "word " * 300]
    options = RunOptions(vectors="tokens", embedding={"truncate": True})
    report = embed_files([_source(tmp_path, texts)], str(tmp_path / "run"), [model], options)
    assert report.tally.truncated == 1
    _assert_equal(_rows(tmp_path / "run", "parquet"), model.encode(texts, truncate=True))


def test_embeddings_and_token_vectors_do_not_share_a_run(tmp_path: Path, model: Local) -> None:
    source = _source(tmp_path)
    embed_files([source], str(tmp_path / "run"), [model], RunOptions(rows_per_part=4))
    with pytest.raises(ResumeError, match="the option vectors was 'embeddings' and is 'tokens'"):
        embed_files([source], str(tmp_path / "run"), [model], RunOptions(rows_per_part=4, vectors="tokens"))


def test_estimate_counts_the_vectors_of_all_tokens(tmp_path: Path, model: Local) -> None:
    texts = [f"text {number}" for number in range(600)]
    options = RunOptions(vectors="tokens", rows_per_part=100)
    result = estimate([_source(tmp_path, texts)], str(tmp_path / "run"), [model], options)
    assert (result.num_rows, result.num_parts) == (600, 6)
    assert result.output_bytes > 600 * 4 * 384 * 4 * 0.8  # at least [CLS], text, number, [SEP]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_format": "npy"}, "cannot contain a different number of vectors per text: use parquet"),
        ({"embedding": {"embedding_type": "int8"}}, "embedding_type is 'int8', but token vectors are not"),
        ({"embedding": {"embedding_type": "binary"}}, "embedding_type is 'binary', but token vectors are"),
        ({"embedding": {"pooling": "cls"}}, "pooling does not apply to token vectors: omit it"),
        ({"embedding": {"normalize": False}}, "normalize does not apply to token vectors: omit it"),
        ({"embedding": {"ranges": np.zeros((2, 384))}}, "ranges does not apply to token vectors: omit it"),
        ({"keep": ("token_ids",)}, "keep contains 'token_ids', a column of the output"),
        ({"vectors": "sparse"}, "vectors is 'sparse': use one of embeddings, tokens"),
    ],
)
def test_options_that_do_not_apply_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunOptions(**{"vectors": "tokens"} | options)
