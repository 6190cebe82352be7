"""`attnlens export` and `attnlens check`: exit codes, messages, output."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Manifest, Pooling
from attnlens_cli.commands.bundles.check import check
from attnlens_cli.commands.bundles.export import export
from attnlens_export import bundle
from attnlens_export.graph.names import role_name
from attnlens_export.manifest import describe_bundle
from attnlens_export.published.prompts import Prompts, read_prompts
from attnlens_model import Encoder, EncoderConfig
from attnlens_publisher import process
from attnlens_publisher.process import TOKENIZER_IMPORTS
from configs import changed
from schemas import conforms
from small_bundles import MODELS

# For tests of something else than parity.
FEW = ("--parity-tokens", 2)


@pytest.fixture
def config_file(tiny_config: EncoderConfig, tmp_path: Path) -> Path:
    path = tmp_path / "my-encoder.json"
    path.write_text(tiny_config.to_json(), encoding="utf-8")
    return path


def run_export(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(each) for each in arguments])


def run_check(*arguments: object) -> Result:
    return CliRunner().invoke(check, [str(each) for each in arguments])


@pytest.mark.parametrize(("name", "started"), [("config.json", [TOKENIZER_IMPORTS]), ("other.json", [])])
def test_process_of_the_publishers_libraries_starts_before_pytorch_is_imported(
    name: str, started: list[tuple[str, ...]], source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(process, "start", found.append)
    (source / name).write_text("{}", encoding="utf-8")
    assert run_export(source, "--output", output).exit_code == 1
    assert found == started


@pytest.mark.usefixtures("traced_once")
def test_prompts_and_pooling_of_the_command_line_end_up_in_the_manifest(
    config_file: Path, output: Path
) -> None:
    prompts = ("--prompt", "query=query: ", "--prompt", "maths=a=b ", "--default-prompt", "query")
    result = run_export(
        "--config", config_file, "--output", output, *FEW, "--pooling", "weighted_mean", *prompts
    )
    assert result.exit_code == 0, result.output
    assert "prompts: maths 'a=b ', query 'query: ' (default)\n" in result.stdout
    assert "embeddings: weighted_mean over the tokens; not normalized; 48 components (as in" in result.stdout
    manifest = read_manifest(output)
    assert dict(manifest.prompts) == {"query": "query: ", "maths": "a=b "}
    assert manifest.default_prompt_name == "query"
    assert manifest.pooling.pooling == Pooling.POOLING_WEIGHTED_MEAN
    assert read_prompts(output) == Prompts(dict(manifest.prompts), "query")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "query"], "'query' is not NAME=TEXT"),
        (["--prompt", "=query: "], "'=query: ' is not NAME=TEXT"),
        (["--prompt", "a=b", "--prompt", "a=c"], "'a' is given twice"),
        (["--default-prompt", "query"], "the default prompt is 'query', but the prompts are none"),
        (["--skip-module", "Dense"], "--skip-module Dense: the checkpoint lists none"),
    ],
)
def test_options_about_prompts_and_modules_that_make_no_sense_are_named(
    options: list[str], message: str, config_file: Path, output: Path
) -> None:
    result = run_export("--config", config_file, "--output", output, *options)
    assert result.exit_code in {1, 2}
    assert message in result.stderr
    assert not output.exists()


@pytest.mark.usefixtures("traced_once")
def test_export_of_a_configuration_then_check(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output)
    assert result.exit_code == 0, result.output
    assert "my-encoder, 2 layers, 4 heads, hidden size 48, up to 40 tokens" in result.stdout
    assert "no tokenizer: a server accepts only token ids" in result.stdout
    assert (
        "from config+seed:0\n"
        "embeddings: mean over the tokens; not normalized; 48 components (the default of a newly initialized "
        "encoder, see --pooling and --normalize)\n"
        "prompts: none\n"
        "maximum input: 40 tokens, the limit of the encoder\n"
    ) in result.stdout
    assert "warning" not in result.stderr
    assert "FAILED" not in result.stdout
    assert result.stdout.count("passed") > 20
    assert result.stderr.splitlines()[0] == "Initializing the weights"
    assert read_manifest(output).model_name == "my-encoder"

    result = run_check(output)
    assert result.exit_code == 0, result.output
    assert "my-encoder against PyTorch (the weights inside the bundle), 6 input" in result.stdout
    assert "files match the hashes in the manifest" in result.stdout

    result = run_check(output, "--json")
    assert result.exit_code == 0
    report = conforms("check", result.stdout)
    assert report["passed"]
    assert report["model"] == "my-encoder"
    assert report["max_tokens"] == 40
    errors = [each for each in report["parity"]["comparisons"] if each["figure"].startswith("max abs error")]
    assert len(errors) == 3 * 6


@pytest.fixture
def published(source: Path) -> Path:
    """A checkpoint of sentence-transformers: mean pooling, normalized, a limit below that of the encoder."""
    MODELS["wordpiece"].make().save_pretrained(source)
    names = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 96, "pooling_mode": "mean"}
    (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    return source


def test_export_of_a_checkpoint(published: Path, output: Path) -> None:
    choices = ("--name", "mine", "--pooling", "cls", "--no-normalize")
    result = run_export(published, "--output", output, *choices)
    assert result.exit_code == 0, result.output
    assert "mine, 1 layers, 3 heads, hidden size 96, up to 20 tokens" in result.stdout
    assert (
        "embeddings: cls over the tokens; not normalized; 96 components (changed by the "
        "options)\nprompts: none\n"
        "maximum input: 20 tokens, the publisher's limit (the encoder supports 34)\n"
    ) in result.stdout
    reason = "because the encoder's outputs do not depend on them"
    assert f"left out {reason}: pooler (2 tensors)\n" in result.stdout
    assert not read_manifest(output).pooling.normalize
    assert read_manifest(output).source_revision == ""
    assert json.loads(run_check(output, "--json").stdout)["max_tokens"] == 20  # as `info` calls it


def test_commit_of_a_hub_checkpoint_is_recorded(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    MODELS["wordpiece"].make().save_pretrained(snapshot)
    monkeypatch.setattr("attnlens_model.checkpoint.hub.snapshot_download", lambda *_, **__: str(snapshot))
    result = run_export("org/name", "--output", output, "--pooling", "mean")
    assert result.exit_code == 0, result.output
    assert f"from org/name at {snapshot.name}\n" in result.stdout
    manifest = read_manifest(output)
    assert (manifest.source, manifest.source_revision) == ("org/name", snapshot.name)


@pytest.mark.usefixtures("broken_trace")
def test_failed_parity_exits_1_with_one_line(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: parity failed: onnx/model")
    assert not output.exists()

    result = run_export("--config", config_file, "--output", output, "--keep-failed")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert not read_manifest(output).parity.passed
    # The wrong weights are the bundle's own, so a new comparison with those passes, and is not enough.
    result = run_check(output)
    assert result.exit_code == 1
    assert "FAILED" not in result.stdout
    assert "this bundle failed parity when it was exported" in result.stderr


@pytest.mark.usefixtures("traced_once")
def test_existing_directory_exits_2_without_force(config_file: Path, output: Path) -> None:
    assert run_export("--config", config_file, "--output", output, *FEW).exit_code == 0
    result = run_export("--config", config_file, "--output", output, *FEW)
    assert result.exit_code == 2
    assert f"{output} exists: choose another directory, or replace it with --force" in result.stderr
    assert run_export("--config", config_file, "--output", output, *FEW, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either SOURCE or --config"),
        (["org/name", "--config", "CONFIG"], "give either SOURCE or --config"),
        (["org/name", "--seed", "1"], "--seed is for random weights"),
        (["--config", "CONFIG", "--revision", "main"], "--revision needs a SOURCE on the hub"),
        (["--config", "missing.json"], "does not exist"),
        (["--config", "CONFIG", "--pooling", "last"], "'last' is not one of"),
        (["--config", "CONFIG", "--seed", "-1"], "-1 is not in the range"),
        (["--config", "CONFIG", "--seed", str(2**64)], f"{2**64} is not in the range"),
    ],
)
def test_mistake_exits_2(arguments: list[str], message: str, config_file: Path, output: Path) -> None:
    given = [str(config_file) if each == "CONFIG" else each for each in arguments]
    result = run_export(*given, "--output", output)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not output.exists()


def test_bad_configuration_exits_2_and_names_the_key(tmp_path: Path, output: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"hidden_sise": 48}', encoding="utf-8")
    result = run_export("--config", path, "--output", output)
    assert result.exit_code == 2
    assert "unknown key 'hidden_sise' (did you mean 'hidden_size'?)" in result.stderr


def test_missing_source_exits_1(tmp_path: Path, output: Path) -> None:
    result = run_export(tmp_path / "nothing", "--output", output)
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("traced_once")
def test_check_rejects_an_altered_bundle(config_file: Path, output: Path) -> None:
    run_export("--config", config_file, "--output", output, *FEW)
    (output / "config.json").write_text("{}", encoding="utf-8")
    result = run_check(output)
    assert result.exit_code == 1
    assert "config.json was altered" in result.stderr
    assert result.stdout == ""


def test_check_of_another_directory_exits_1(tmp_path: Path) -> None:
    result = run_check(tmp_path)
    assert result.exit_code == 1
    assert "is not a bundle" in result.stderr
    assert run_check(tmp_path / "nothing").exit_code == 2
    assert run_check(tmp_path, "--revision", "main").exit_code == 2


def test_check_names_the_failure(published: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_export(published, "--output", output).exit_code == 0
    monkeypatch.setattr("attnlens_export.parity.reference.TOLERANCE", 1e-9)
    monkeypatch.setattr("attnlens_export.parity.reference.REFERENCE_ERROR_RATIO", 1e-3)
    result = run_check(output, "--source", published)
    assert result.exit_code == 1
    assert "against PyTorch (the checkpoint source)" in result.stdout
    assert "FAILED" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("Error: parity failed: onnx/model")


@pytest.mark.usefixtures("traced_once")
def test_name_is_shown_unchanged(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, *FEW, "--name", "my[/v2]")
    assert result.exit_code == 0, result.output
    assert "my[/v2] against PyTorch" in result.stdout
    result = run_check(output, *FEW)
    assert result.exit_code == 0, result.output
    assert "my[/v2] against PyTorch (the weights" in result.stdout


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "\udcff"])
def test_name_that_cannot_be_printed_is_rejected(name: str, config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, "--name", name)
    assert result.exit_code == 1
    assert "can't be printed" in result.stderr
    assert not output.exists()


@pytest.mark.usefixtures("traced_once")
def test_largest_seed_is_a_seed(config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlens_model import new_encoder  # noqa: PLC0415 - beside its replacement

    # The trace that exists has the weights of seed 0.
    seeds: list[int] = []

    def note(config: EncoderConfig, seed: int) -> Encoder:
        seeds.append(seed)
        new_encoder(config, seed)
        return new_encoder(config, 0)

    monkeypatch.setattr(bundle, "new_encoder", note)
    assert run_export("--config", config_file, "--output", output, *FEW, "--seed", 2**64 - 1).exit_code == 0
    assert seeds == [2**64 - 1]


def test_encoder_that_exceeds_the_memory_is_rejected(
    tiny_config: EncoderConfig, tmp_path: Path, output: Path
) -> None:
    path = tmp_path / "large.json"
    path.write_text(
        changed(tiny_config, {"embeddings.vocab_size": 2**24, "hidden_size": 2**17}).to_json(),
        encoding="utf-8",
    )
    result = run_export("--config", path, "--output", output)
    assert result.exit_code == 1
    assert "not enough memory for an encoder of this size" in result.stderr


def test_revision_of_a_directory_is_rejected(minilm_dir: Path, output: Path) -> None:
    result = run_export(minilm_dir, "--output", output, "--revision", "v1")
    assert result.exit_code == 1
    assert "is a local directory, which has no revisions" in result.stderr


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_leaves_nothing_behind(
    number: signal.Signals, code: int, config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(*arguments: Any) -> Manifest:
        assert [path.suffix for path in output.parent.iterdir()] == [".partial"]
        signal.raise_signal(number)
        return describe_bundle(*arguments)

    monkeypatch.setattr(bundle, "describe_bundle", interrupted)
    before = signal.signal(number, signal.SIG_DFL)  # it may be ignored, where the tests run under nohup
    try:
        result = run_export("--config", config_file, "--output", output, *FEW)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1] == f"export: stopped by {number.name}"
    assert list(output.parent.iterdir()) == []


@pytest.mark.usefixtures("traced_once")
def test_ignored_hangup_stays_ignored(
    config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup."""

    def interrupted(*arguments: Any) -> Manifest:
        signal.raise_signal(signal.SIGHUP)
        return describe_bundle(*arguments)

    monkeypatch.setattr(bundle, "describe_bundle", interrupted)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_export("--config", config_file, "--output", output, *FEW).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("traced_once")
def test_omitted_comparisons_are_reported(
    config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 layers of 4 heads: hidden states of 38 tokens fit, maps of 37."""
    monkeypatch.setattr("attnlens_export.parity.grid.MAX_MAP_BYTES", 4 * 2 * 4 * 38**2 - 1)
    monkeypatch.setattr("attnlens_export.parity.grid.MAX_LAYER_MAP_BYTES", 8 * 4 * 39**2 - 1)
    result = run_export("--config", config_file, "--output", output)
    assert result.exit_code == 0, result.output
    lengths = (
        "longest input compared, in tokens: last_hidden_state 38, attention_weights 37; the encoder takes 40"
    )
    assert lengths in " ".join(result.stdout.split())
    large = (8, 16, "middle"), (8, 33, "left"), (2, 38, "left"), (1, 38, "none")
    path = "onnx/model_attentions.onnx"
    left_out = ", ".join(f"{path} on {size}x{length} {padding}" for size, length, padding in large)
    assert f"not compared, too large: {left_out}" in " ".join(result.stdout.split())
    report = json.loads((output / "parity" / "report.json").read_text(encoding="utf-8"))
    assert report["parity"]["remarks"] == [lengths, f"not compared, too large: {left_out}"]
    assert lengths in (output / "parity" / "report.md").read_text(encoding="utf-8")
    figures = read_manifest(output).parity.figures
    found = [(figure.graph, role_name(figure.role), figure.longest_input_tokens) for figure in figures]
    assert found == [
        ("embeddings", "last_hidden_state", 38),
        ("attention", "last_hidden_state", 37),
        ("attention", "attention_weights", 37),
    ]


@pytest.mark.usefixtures("traced_once")
def test_longest_input_that_is_compared_can_be_chosen(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, "--parity-tokens", 11)
    assert result.exit_code == 0, result.output
    assert "longest input compared, in tokens: 11; the encoder takes 40" in result.stdout
    result = run_check(output, "--parity-tokens", 13)
    assert "longest input compared, in tokens: 13; the encoder takes 40" in result.stdout


def test_help_has_an_example() -> None:
    for run in (run_export, run_check):
        result = run("--help")
        assert result.exit_code == 0
        assert "Example:\n    attnlens " in result.stdout
