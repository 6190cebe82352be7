"""Identity of a run: `run.json`, and the parts that a repeated call accepts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bulk_runs
from attnlens_bulk import OutputError, ResumeError, RunOptions, embed_files
from attnlens_server.in_process import Local

DEFAULTS: dict[str, Any] = {
    "pooling": "mean",
    "normalize": True,
    "dimensions": np.int64(384),
    "dtype": "float32",
    "embedding_type": "float",
    "prompt": "",
    "truncate": False,
}
OPTIONS = RunOptions(rows_per_part=2, text_columns=("text",))


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "texts.csv"
    path.write_text("text\none\ntwo\nthree\n" + "word " * 60 + "\nfive\n")
    return str(path)


def _edit(run: Path, **changes: Any) -> None:
    content = json.loads((run / "run.json").read_bytes())
    (run / "run.json").write_text(json.dumps(content | changes))


def _run_of_an_older_version(run: Path) -> None:
    """Rewrite a run as if it had been written before the limit of tokens and records of parts existed."""
    content = json.loads((run / "run.json").read_bytes())
    del content["model"]["max_tokens"], content["records"]
    names = ("text_columns", "id_column", "keep", "output_format", "rows_per_part")
    content["options"] = {name: content["options"][name] for name in names}
    (run / "run.json").write_text(json.dumps(content))
    for record in (run / "records").iterdir():
        record.unlink()


@pytest.mark.parametrize("name", [*DEFAULTS, "all"])
def test_default_that_is_given_explicitly_is_the_same_run(
    tmp_path: Path, model: Local, source: str, name: str
) -> None:
    given = DEFAULTS if name == "all" else {name: DEFAULTS[name]}
    explicit = RunOptions(rows_per_part=2, embedding=given)
    for index, (before, now) in enumerate([(OPTIONS, explicit), (explicit, OPTIONS)]):
        run = tmp_path / str(index)
        embed_files([source], str(run), [model], before)
        (run / "parts" / "part-000001.parquet").unlink()
        assert embed_files([source], str(run), [model], now).num_written == 1


def test_description_contains_everything_that_changes_a_vector(
    tmp_path: Path, model: Local, source: str
) -> None:
    embed_files([source], str(tmp_path / "run"), [model], OPTIONS)
    content = json.loads((tmp_path / "run" / "run.json").read_bytes())
    info = model.get_model()
    assert content["model"] == {
        "name": info.name,
        "version": info.version,
        "engine": info.engine,
        "precision": info.precision,
        "max_tokens": 256,
        "similarity": "cosine",
    }
    resolved = DEFAULTS | {"vectors": "embeddings", "empty": "embed", "output_format": "parquet"}
    assert {name: content["options"][name] for name in resolved} == resolved


@pytest.mark.parametrize("truncate", [True, False])
def test_other_token_limit_is_refused(
    tmp_path: Path, model: Local, short_model: Local, source: str, truncate: bool
) -> None:
    options = RunOptions(rows_per_part=2, embedding={"truncate": truncate})
    embed_files([source], str(tmp_path / "run"), [model], options)
    with pytest.raises(ResumeError, match=r"the model's max_tokens was 256 and is 32: restore it"):
        embed_files([source], str(tmp_path / "run"), [short_model], options)


def test_changed_policy_for_empty_texts_is_refused(tmp_path: Path, model: Local, source: str) -> None:
    embed_files([source], str(tmp_path / "run"), [model], OPTIONS)
    with pytest.raises(ResumeError, match="the option empty was 'embed' and is 'skip'"):
        embed_files([source], str(tmp_path / "run"), [model], RunOptions(rows_per_part=2, empty="skip"))


def test_run_of_an_older_version_continues_and_adopts_the_token_limit(
    tmp_path: Path, model: Local, short_model: Local, source: str
) -> None:
    run = tmp_path / "run"
    embed_files([source], str(run), [model], OPTIONS)
    _run_of_an_older_version(run)
    (run / "parts" / "part-000001.parquet").unlink()
    report = embed_files([source], str(run), [model], OPTIONS)
    assert (report.num_parts, report.num_written) == (3, 1)
    assert json.loads((run / "run.json").read_bytes())["model"]["max_tokens"] == 256
    with pytest.raises(ResumeError, match="max_tokens was 256 and is 32"):
        embed_files([source], str(run), [short_model], OPTIONS)


def _shorten(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-1])


def _flip(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def _remove_record(part: Path) -> None:
    (part.parents[1] / "records" / part.name).with_suffix(".json").unlink()


def _damage_record(part: Path) -> None:
    (part.parents[1] / "records" / part.name).with_suffix(".json").write_text('{"size_bytes": []}')


@pytest.mark.parametrize(
    "damage",
    [_shorten, _flip, lambda part: part.write_bytes(b""), _remove_record, _damage_record],
    ids=["shorter", "changed", "empty", "no record", "invalid record"],
)
def test_part_that_does_not_fit_its_record_is_computed_again(
    tmp_path: Path, model: Local, source: str, damage: Any
) -> None:
    run = tmp_path / "run"
    embed_files([source], str(run), [model], OPTIONS)
    whole = bulk_runs.contents(run)
    damage(run / "parts" / "part-000001.parquet")
    report = embed_files([source], str(run), [model], OPTIONS)
    assert (report.num_parts, report.num_written) == (3, 1)
    assert bulk_runs.contents(run) == whole


ODD = {
    "empty file": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"format_version": "\xff"}',
    "deep": b"[" * 100_000,
    "huge number": b'{"format_version": ' + b"1" * 5_000 + b"}",
    "null": b"null",
    "list": b"[]",
    "string": b'"run"',
    "number": b"5",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_description_that_is_not_an_object_is_refused(
    tmp_path: Path, model: Local, source: str, content: bytes
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes(content)
    with pytest.raises(
        ResumeError, match=rf"^{run}/run.json does not describe a run: it is not .* use another"
    ):
        embed_files([source], str(run), [model], OPTIONS)


NESTED: Any = []
for _ in range(900):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "has format version 2, but this version writes 1"),
        ({"format_version": True}, "has format version True"),
        ({"format_version": None}, "has format version None"),
        ({"format_version": [1]}, r"has format version \[1\]"),
        ({"format_version": "x" * 10_000_000}, r"has format version 'x{399}\.\.\., but"),
        ({"model": None}, "does not describe a run: 'model' is not an object"),
        ({"options": []}, "'options' is not an object"),
        ({"vectors": "float32"}, "'vectors' is not an object"),
        ({"inputs": {}}, "'inputs' is not a list of files"),
        ({"inputs": [None]}, "'inputs' is not a list of files"),
        ({"inputs": [{"file": 5}]}, "'inputs' is not a list of files"),
        ({"inputs": []}, "the input .*texts.csv is new"),
        ({"inputs": [{"file": "\ud800"}]}, r"the input \\ud800 of the run is missing"),
        ({"model": {}}, "the model's name was None and is"),
        ({"vectors": {}}, "the vectors' type was None and is 'float32'"),
        ({"options": {}}, "the option text_columns was None and is"),
        ({"options": {"prompt_name": []}}, "the option "),
        ({"options": {"keep": NESTED}}, "the option "),
        ({"model": {"max_tokens": NESTED}}, "the model's name"),
    ],
)
def test_odd_description_is_refused_with_a_reason(
    tmp_path: Path, model: Local, source: str, changes: Any, message: str
) -> None:
    run = tmp_path / "run"
    embed_files([source], str(run), [model], OPTIONS)
    _edit(run, **changes)
    with pytest.raises(ResumeError, match=message):
        embed_files([source], str(run), [model], OPTIONS)


@pytest.mark.parametrize("key", ["format", "size_bytes", "sha256", "sha256_of", "modified"])
def test_input_without_a_fingerprint_is_refused(tmp_path: Path, model: Local, source: str, key: str) -> None:
    run = tmp_path / "run"
    embed_files([source], str(run), [model], OPTIONS)
    [entry] = json.loads((run / "run.json").read_bytes())["inputs"]
    _edit(run, inputs=[{name: value for name, value in entry.items() if name != key}])
    if key == "modified":  # which is only compared for large files
        assert embed_files([source], str(run), [model], OPTIONS).num_written == 0
        return
    with pytest.raises(ResumeError, match=f"has changed: its {key} was None, now"):
        embed_files([source], str(run), [model], OPTIONS)


def test_large_description_is_not_read(
    tmp_path: Path, model: Local, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_bulk.storage.MAX_JSON_BYTES", 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(b" " * 101)
    with pytest.raises(OutputError, match="run cannot be read: it has more than 100 bytes"):
        embed_files([source], str(tmp_path / "run"), [model], OPTIONS)
