"""A checkpoint with adapters of several tasks becomes a bundle for one of them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnlens.bundle import BundleError, read_manifest
from attnlens_cli.commands.bundles.check import check
from attnlens_cli.commands.bundles.export import export
from attnlens_export import ExportOptions, check_bundle, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import read_config
from oracles.jina_v3 import TASKS, write_checkpoint
from small_files import read, sign, write

GRID = small_grid(9)
OWN_CODE = "custom_st.Transformer"
PROMPTS = {
    "retrieval.query": "Represent the query: ",
    "retrieval.passage": "Represent it: ",
    "separation": "",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks") / "source"
    write_checkpoint(directory)
    # As published: the module of the publisher's own code is a Transformer that takes a task.
    kinds = {"": OWN_CODE, "1_Pooling": "sentence_transformers.models.Pooling"}
    modules = [{"idx": index, "path": path, "type": kind} for index, (path, kind) in enumerate(kinds.items())]
    write(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True}
    write(directory / "1_Pooling" / "config.json", pooling)
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    write(directory / "config_sentence_transformers.json", prompts)
    return directory


def test_bundle_states_its_task_consistently(source: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    task = TASKS[1]
    summary = export_bundle(
        source,
        bundle,
        ExportOptions(adapter_task=task, skipped_modules=[OWN_CODE], pooling="mean", grid=GRID),
    )
    assert f"task: {task}, whose adapters are merged into the weights as requested" in summary.decisions
    manifest = read_manifest(bundle)
    assert (manifest.adapter_task, dict(manifest.prompts), manifest.default_prompt_name) == (
        task,
        PROMPTS,
        "",
    )
    assert json.loads((bundle / "config.json").read_text("utf-8"))["attnlens_adapter_task"] == task
    assert read_config(bundle / "config.json").family == "jina_v3"
    checked = check_bundle(bundle, source, grid=GRID)
    assert checked.verdict.passed
    assert checked.not_stated == ()
    # Another task's weights are not those inside.
    write(bundle / "config.json", read(bundle / "config.json") | {"attnlens_adapter_task": TASKS[0]})
    sign(bundle)
    message = f"adapter_task is '{task}', but '{TASKS[0]}' according to the files"
    with pytest.raises(BundleError, match=message):
        check_bundle(bundle, source, grid=GRID)


def test_command_takes_a_task_or_none_and_names_those_that_there_are(source: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        output = ["--output", str(tmp_path / "bundle"), "--parity-tokens", "8", "--pooling", "mean"]
        result = CliRunner().invoke(export, [*arguments, *output])
        return result.exit_code, " ".join(result.output.split())

    code, shown = run(str(source))
    assert code == 1
    assert f"has adapters for the tasks {', '.join(TASKS)}: choose one of them (--adapter-task)" in shown
    code, shown = run(str(source), "--adapter-task", "none")
    assert code == 1
    assert f"add --skip-module {OWN_CODE} to export the encoder without it" in shown
    code, shown = run(str(source), "--adapter-task", "none", "--skip-module", OWN_CODE)
    assert code == 0, shown
    assert "task: none, the adapters of all tasks are omitted as requested" in shown
    assert read_manifest(tmp_path / "bundle").adapter_task == "none"
    result = CliRunner().invoke(
        check, [str(tmp_path / "bundle"), "--source", str(source), "--parity-tokens", "8"]
    )
    assert result.exit_code == 0, result.output
    write(tmp_path / "my.json", {"hidden_size": 8})
    code, shown = run("--config", str(tmp_path / "my.json"), "--adapter-task", "none")
    assert code == 2
    assert "--adapter-task needs a SOURCE, not --config" in shown
