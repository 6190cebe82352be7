"""JSON output conforms to docs/schemas/. Tests of bench, check, heads and profile check this, too."""

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from schemas import SCHEMAS, conforms, schema
from scripted import ScriptedServer
from served import ServerProcess

RunHere = Callable[..., tuple[int, str, str]]

DOCS = SCHEMAS.parent
A, B = "It was unbelievably wet.", "Rain."
OUTPUTS = {
    "info": ("info", "--json"),
    "health": ("health", "--json"),
    "tokenize": ("tokenize", A, "--text-pair", B, "--json"),
    "encode": ("encode", A, "--layer", "0"),
    "encode words": ("encode", A, "--outputs", "attention,embedding", "--words", "--no-special"),
    "attend": ("attend", A, "--json"),
    "attend words": ("attend", A, "--text-pair", B, "--words", "--no-special", "--json"),
    "attend top": ("attend", A, "--rollout", "--top", "2", "--json"),
    "attend all": ("attend", A, "--layer", "all", "--head", "all", "--no-special", "--json"),
    "attend all heads": ("attend", A, "--head", "all", "--top", "2", "--json"),
    "explain": ("explain", A, "--json"),
    "explain all": (
        "explain",
        A,
        "--to",
        B,
        "--rather-than",
        "Sun.",
        "--verify",
        "--head-contributions",
        "--words",
        "--json",
    ),
    "compare": ("compare", A, B, "--words", "--json"),
    "compare output": ("compare", A, B, "--matrix", "output", "--json"),
    "compare interaction": ("compare", A, B, "--matrix", "interaction", "--json"),
    "compare input": ("compare", "wet", "rain", "--matrix", "input", "--dimensions", "8", "--json"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_object_conforms_to_its_schema(run_here: RunHere, minilm_server: ServerProcess, name: str) -> None:
    code, out, err = run_here(*OUTPUTS[name], "--address", minilm_server.address)
    assert (code, err, out.count("\n") if name != "info" else 1) == (0, "", 1)
    conforms(name.partition(" ")[0], out)


@pytest.mark.parametrize(
    ("command", "args"),
    [("embed", ()), ("tokenize", ("--input",)), ("encode", ("--outputs", "embedding", "--input"))],
)
def test_line_conforms_to_its_schema_and_keeps_other_keys(
    run_here: RunHere, minilm_server: ServerProcess, tmp_path: Path, command: str, args: tuple[str, ...]
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"text": A, "id": 7}) + "\n" + json.dumps({"text": A, "text_pair": B}))
    code, out, _ = run_here(command, *args, source, "--address", minilm_server.address)
    first, second = out.splitlines()
    assert code == 0
    assert conforms(command, first, {"id"})["id"] == 7
    assert conforms(command, second)["index"] == 1


def test_bundle_list_conforms_to_its_schema(run_here: RunHere, minilm_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "minilm").symlink_to(minilm_bundle)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{", encoding="utf-8")
    listed = json.loads(run_here("list", tmp_path, "--json")[1])
    assert [conforms("list", json.dumps(bundle))["facts"] is None for bundle in listed] == [True, False]


def test_gates_and_a_missing_server_conform_to_their_schemas(
    run_here: RunHere, server: ScriptedServer
) -> None:
    conforms("attend", run_here("attend", "abc", "--gates", "--json", "--address", server.address)[1])
    conforms("encode", run_here("encode", "abc", "--address", server.address)[1])
    conforms("health", run_here("health", "--json", "--address", "127.0.0.1:1")[1])


@pytest.mark.parametrize("name", [path.stem for path in sorted(SCHEMAS.glob("*.json"))])
def test_every_schema_object_specifies_additional_properties(name: str) -> None:
    objects = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            if value.get("type") == "object" and "properties" in value:
                objects.append(value)
            for inner in value.values():
                collect(inner)
        if isinstance(value, list):
            for inner in value:
                collect(inner)

    whole = schema(name)
    collect(whole)
    assert objects
    assert all("additionalProperties" in found for found in objects)
    assert all("description" in described for described in whole["properties"].values())


def test_schema_rejects_changed_output(run_here: RunHere, server: ScriptedServer) -> None:
    right = json.loads(run_here("attend", "abc", "--json", "--address", server.address)[1])
    validator = Draft202012Validator(schema("attend"))
    assert validator.is_valid(right)
    changes: list[Callable[[Any], object]] = [
        lambda value: value.pop("tokens"),
        lambda value: value.update(new=1),
        lambda value: value["tokens"][0].update(new=1),
        lambda value: value.update(layer="1"),
        lambda value: value.pop("layer"),
    ]
    for change in changes:
        wrong = copy.deepcopy(right)
        change(wrong)
        assert not validator.is_valid(wrong)


def test_page_has_the_tables_of_all_schemas() -> None:
    tables = runpy.run_path(str(DOCS / "json_tables.py"))
    page = (DOCS / "json_output.md").read_text(encoding="utf-8")
    assert tables["page"]() == page
    assert {name for _, name, _ in tables["BLOCK"].findall(page)} == {
        path.stem for path in SCHEMAS.glob("*.json")
    }
