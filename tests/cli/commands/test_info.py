"""`attnlens info` as a process."""

import json
import re
import subprocess
from collections.abc import Callable

from attnlens.v1.manifest_pb2 import Parity, ParityFigure
from scripted import ScriptedServer
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_info_shows_the_model(run: Run, minilm_server: ServerProcess) -> None:
    shown = run("info", "--address", minilm_server.address).stdout
    for words in (
        "all-MiniLM-L6-v2",
        "6 x 12",
        "256 tokens",
        "CPUExecutionProvider",
        "passed",
        "last_hidden_state",
    ):
        assert words in shown


def test_info_cuts_no_number_in_a_narrow_terminal(run: Run, minilm_server: ServerProcess) -> None:
    wide = run("info", "--address", minilm_server.address, env={"COLUMNS": "120"}).stdout
    narrow = run("info", "--address", minilm_server.address, env={"COLUMNS": "60"}).stdout
    numbers = re.findall(r"\d\.\de-\d\d|\d\.\d{9}", wide)
    assert len(numbers) > 4
    assert re.findall(r"\d\.\de-\d\d|\d\.\d{9}", narrow) == numbers


def test_info_as_json_holds_everything(run: Run, minilm_server: ServerProcess) -> None:
    answer = json.loads(run("info", "--json", "--address", minilm_server.address).stdout)
    assert (answer["hidden_size"], answer["num_layers"], answer["num_heads"]) == (384, 6, 12)
    assert answer["parity"]["passed"] is True
    assert all(figure["max_abs_error"] <= 1e-5 for figure in answer["parity"]["figures"])
    assert answer["limits"]["max_inputs_per_request"] == 512


def test_errors_are_below_their_graph_in_lines_of_80_columns(server: ScriptedServer, run: Run) -> None:
    graphs = ("onnx/model.onnx", "onnx/model_attentions.onnx", "onnx/model_fp16.onnx")
    outputs = [(graph, "last_hidden_state") for graph in graphs] + [(graphs[1], "attentions")]
    figures = [ParityFigure(graph=graph, output=output) for graph, output in sorted(outputs)]
    server.model.parity.CopyFrom(Parity(figures=figures))
    result = run("info", "--address", server.address, env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    names = [line.split()[0] for line in result.stdout.rpartition("─")[2].splitlines() if line.strip()]
    hidden = "last_hidden_state"
    assert names == [
        *("model.onnx", hidden),
        *("model_attentions.onnx", "attentions", hidden),
        *("model_fp16.onnx", hidden),
    ]
