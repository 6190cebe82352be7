"""`attnlens layout` and `attnlens export --layout`: files, output and errors."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest, write_manifest
from attnlens_cli.commands.bundles.export import export
from attnlens_cli.commands.bundles.layout import layout
from attnlens_cli.commands.options import LAYOUT_NAMES
from attnlens_export.layouts import LAYOUTS
from attnlens_model import EncoderConfig


@pytest.fixture
def config_file(tiny_config: EncoderConfig, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(tiny_config.to_json(), encoding="utf-8")
    return path


def run_export(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(each) for each in (*arguments, "--parity-tokens", 7)])


def run_layout(*arguments: object) -> Result:
    return CliRunner().invoke(layout, [str(each) for each in arguments])


def files_of(directory: Path) -> set[str]:
    return {each.relative_to(directory).as_posix() for each in directory.rglob("*") if each.is_file()}


@pytest.mark.usefixtures("traced_once")
def test_export_with_layouts_makes_them_beside_the_bundle(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, "--layout", "triton", "--layout", "ovms")
    assert result.exit_code == 0, result.output
    triton, ovms = output.with_name("tiny-triton"), output.with_name("tiny-ovms")
    assert set(output.parent.iterdir()) == {output, triton, ovms}
    assert result.stdout.splitlines()[-4:] == [
        f"{triton}: tiny, tiny_attentions for Triton, 3 files copied, 4 written",
        f"start it with: tritonserver --model-repository={triton}",
        f"{ovms}: tiny, tiny_attentions for OpenVINO Model Server, 3 files copied, 3 written",
        f"start it with: ovms --config_path {ovms}/config.json --port 9000",
    ]
    assert files_of(triton) == {
        "README.md",
        "bundle.json",
        "tiny/config.pbtxt",
        "tiny/1/model.onnx",
        "tiny_attentions/config.pbtxt",
        "tiny_attentions/1/model.onnx/model.onnx",
        "tiny_attentions/1/model.onnx/model.onnx_data",
    }
    assert files_of(ovms) == {
        "README.md",
        "bundle.json",
        "config.json",
        "tiny/1/model.onnx",
        "tiny_attentions/1/model.onnx",
        "tiny_attentions/1/model.onnx_data",
    }

    # The bundle of before gives the same trees, byte for byte.
    for kind, made in (("triton", triton), ("ovms", ovms)):
        again = output.with_name("again")
        result = run_layout(output, kind, "--output", again, "--force")
        assert result.exit_code == 0, result.output
        assert files_of(again) == files_of(made)
        for name in files_of(made):
            assert (again / name).read_bytes() == (made / name).read_bytes()


def test_layout_of_the_working_directory_has_its_name(
    config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.mkdir()
    monkeypatch.chdir(output)
    output.with_name("tiny-ovms").mkdir()
    (output.with_name("tiny-ovms") / "file").touch()
    result = run_export("--config", config_file, "--output", ".", "--layout", "ovms")
    assert result.exit_code == 2
    assert "tiny-ovms exists and is not a model repository" in result.stderr


def test_repository_in_the_way_is_noticed_before_the_export(config_file: Path, output: Path) -> None:
    output.with_name("tiny-triton").mkdir()
    (output.with_name("tiny-triton") / "file").touch()
    result = run_export("--config", config_file, "--output", output, "--layout", "triton", "--force")
    assert result.exit_code == 2
    assert "tiny-triton exists and is not a model repository made by attnlens" in result.stderr
    assert "Tracing" not in result.stderr
    assert not output.exists()


@pytest.mark.usefixtures("broken_trace")
def test_failed_bundle_has_no_layout(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, "--keep-failed", "--layout", "triton")
    assert result.exit_code == 1
    assert list(output.parent.iterdir()) == [output]
    result = run_layout(output, "triton", "--output", output.with_name("models"))
    assert result.exit_code == 1
    assert "failed parity, so it must not be served" in result.stderr


@pytest.mark.usefixtures("traced_once")
def test_mistakes_are_one_line(config_file: Path, output: Path, tmp_path: Path) -> None:
    assert run_export("--config", config_file, "--output", output).exit_code == 0
    for arguments, code, message in (
        ((tmp_path / "nothing", "triton", "--output", tmp_path / "models"), 2, "does not exist"),
        ((output.parent, "triton", "--output", tmp_path / "models"), 1, "is not a bundle"),
        ((output, "seldon", "--output", tmp_path / "models"), 2, "'seldon' is not one of 'triton', 'ovms'"),
        ((output, "triton"), 2, "Missing option '--output'"),
        ((output, "triton", "--output", output), 2, "overlap: choose a directory next to the bundle"),
        ((output, "triton", "--output", tmp_path), 2, "overlap: choose a directory next to the bundle"),
    ):
        result = run_layout(*arguments)
        assert result.exit_code == code, result.output
        assert message in result.stderr
        assert not (tmp_path / "models").exists()


@pytest.mark.usefixtures("traced_once")
def test_copies_are_reported(config_file: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_export("--config", config_file, "--output", output).exit_code == 0

    def refuse(_source: str, _target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", refuse)
    result = run_layout(output, "triton", "--output", output.with_name("models"), "--link")
    assert result.exit_code == 0, result.output
    assert "for Triton, 3 files copied (hard links are not possible there), 4 written" in result.stdout
    result = run_layout(output, "triton", "--output", output.with_name("models"), "--force", "--copy")
    assert result.exit_code == 0, result.output
    assert "for Triton, 3 files copied, 4 written" in result.stdout


@pytest.mark.usefixtures("traced_once")
def test_links_are_made_on_request_and_their_drawback_is_reported(config_file: Path, output: Path) -> None:
    result = run_export("--config", config_file, "--output", output, "--layout", "ovms", "--link")
    assert result.exit_code == 0, result.output
    assert "3 files linked (Python's onnx rejects weights with hard links, " in result.stdout
    assert "including those of the bundle), 3 written" in result.stdout
    assert (output / "onnx" / "model.onnx").stat().st_nlink == 3
    result = run_export("--config", config_file, "--output", output, "--link", "--force")
    assert result.exit_code == 2
    assert "--link needs --layout" in result.stderr


@pytest.mark.usefixtures("traced_once")
def test_changed_name_is_shown(config_file: Path, output: Path) -> None:
    assert run_export("--config", config_file, "--output", output).exit_code == 0
    manifest = read_manifest(output)
    manifest.model_name = "my[/v2] one"
    write_manifest(output, manifest)
    result = run_layout(output, "ovms", "--output", output.with_name("models"))
    assert result.exit_code == 0, result.output
    assert "models: my_v2_one, my_v2_one_attentions for" in result.stdout
    config = json.loads((output.with_name("models") / "config.json").read_bytes())
    assert config["model_config_list"][0]["config"]["base_path"] == "my_v2_one"


def test_command_knows_every_layout() -> None:
    assert tuple(LAYOUTS) == LAYOUT_NAMES
    result = run_layout("--help")
    assert result.exit_code == 0
    assert "Example:\n    attnlens layout" in result.stdout
