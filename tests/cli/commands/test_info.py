"""`attnlens info` against real and scripted servers."""

import json
import re
import subprocess
from collections.abc import Callable

from attnlens.v1.manifest_pb2 import Gate, GateKind, LayerInfo, OutputRole, Parity, ParityFigure
from attnlens.v1.model_pb2 import ModelState
from scripted import ScriptedServer
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_info_shows_the_model(run: Run, minilm_server: ServerProcess) -> None:
    shown = run("info", "--address", minilm_server.address).stdout
    for words in (
        "all-MiniLM-L6-v2",
        "6 x 12 heads of 32, softmax",
        "256 tokens",
        "CPUExecutionProvider",
        "passed",
        "last_hidden_state",
    ):
        assert words in shown


def test_info_truncates_no_number_in_a_narrow_terminal(run: Run, minilm_server: ServerProcess) -> None:
    wide = run("info", "--address", minilm_server.address, env={"COLUMNS": "120"}).stdout
    narrow = run("info", "--address", minilm_server.address, env={"COLUMNS": "60"}).stdout
    numbers = re.findall(r"\d\.\de-\d\d|\d\.\d{9}", wide)
    assert len(numbers) > 4
    assert re.findall(r"\d\.\de-\d\d|\d\.\d{9}", narrow) == numbers


def test_info_as_json_is_complete(run: Run, minilm_server: ServerProcess) -> None:
    answer = json.loads(run("info", "--json", "--address", minilm_server.address).stdout)
    assert (answer["hidden_size"], answer["num_layers"], answer["num_heads"]) == (384, 6, 12)
    assert answer["parity"]["passed"] is True
    assert all(figure["max_abs_error"] <= 1e-5 for figure in answer["parity"]["figures"])
    assert answer["limits"]["max_inputs_per_request"] == 2048


def test_parity_errors_are_listed_below_their_graph_within_80_columns(
    server: ScriptedServer, run: Run
) -> None:
    hidden, weights = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE, OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS
    roles = {"attention": [weights, hidden], "embeddings": [hidden], "embeddings.fp16": [hidden]}
    figures = [ParityFigure(graph=graph, role=role) for graph in roles for role in roles[graph]]
    cosine = GateKind.GATE_KIND_MIN_COSINE
    gate = Gate(graph="embeddings.int8", role=hidden, kind=cosine, limit=0.99, value=0.995)
    gate.text_kind = "sentences"
    server.model.parity.CopyFrom(Parity(figures=figures, gates=[gate]))
    result = run("info", "--address", server.address, env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    names = [line.split()[0] for line in result.stdout.rpartition("─")[2].splitlines() if line.strip()]
    assert names == [
        *("attention", "attention_weights", "last_hidden_state"),
        *("embeddings", "last_hidden_state"),
        *("embeddings.fp16", "last_hidden_state"),
    ]
    assert ["last_hidden_state", "min", "cosine,", "sentences", "0.990000", "0.995000"] in [
        line.split() for line in result.stdout.splitlines()
    ]


def test_info_reports_the_current_capabilities_of_a_server(server: ScriptedServer, run: Run) -> None:
    server.model.state = ModelState.MODEL_STATE_DEGRADED
    server.model.source, server.model.source_revision = "a/b", "0123abc"
    layers = [
        LayerInfo(attention="softmax", num_heads=2, num_key_value_heads=1, head_size=8, window_radius=64)
    ]
    server.model.architecture.layers.extend(layers)
    shown = " ".join(run("info", "--address", server.address).stdout.split())
    for words in (
        "version 1a2b",
        "state degraded",
        "a/b at 0123abc",
        "pairs of texts no",
        "2 x 2 heads of 0, softmax",
        "1 x 2 heads of 8, 1 for keys and values, softmax, up to 64 positions away",
    ):
        assert words in shown
