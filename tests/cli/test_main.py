"""The root command: help, usage errors, configuration, missing extras, bugs."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from attnlens_cli import how_to_install
from attnlens_cli.app import COMMANDS
from scripted import ScriptedServer

Run = Callable[..., subprocess.CompletedProcess[str]]


def _program(*lines: str) -> list[str]:
    """Return a command that runs `lines` and then attnlens with the arguments appended to it."""
    return [
        sys.executable,
        "-c",
        "\n".join(("import sys", *lines, "from attnlens_cli.main import main", "main()")),
    ]


def _assert_one_line(result: subprocess.CompletedProcess[str], code: int, line: str) -> None:
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"{line}\n")


def test_version_matches_the_distribution(run: Run) -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"attnlens {version('attnlens')}\n")


def test_script_is_installed(run: Run) -> None:
    script = Path(sys.executable).with_name("attnlens")
    assert run("--version", command=[str(script)]).stdout.startswith("attnlens ")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_every_help_ends_with_an_example(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: {' '.join(('attnlens', *command))} ")
    _, found, example = result.stdout.rpartition("Example")
    assert found
    assert f"attnlens {' '.join(command)}" in example


def test_help_is_shown_without_a_command(run: Run) -> None:
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert all(f"  {name} " in result.stderr for name in COMMANDS)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["embd"], "attnlens: no such command embd (did you mean embed?): there are export, check, "),
        (["quux"], "attnlens: no such command quux: there are export, check, list, layout, try, "),
        (["--verison"], "attnlens: no such option --verison (did you mean --version?)"),
        (["embed", "--addres", "x"], "attnlens embed: no such option --addres (did you mean --address?)"),
        (["embed", "--quux"], "attnlens embed: no such option --quux"),
        (["attend"], "attnlens attend: missing argument 'TEXT'"),
        (
            ["info", "--timeout-s", "0"],
            "attnlens info: invalid value for '--timeout-s': 0.0 is not in the range 0<x<=31536000",
        ),
        (
            ["info", "--tls-key", __file__],
            "attnlens info: only one of --tls-cert and --tls-key is set: set both or neither",
        ),
        (["--log-level", "loud", "info"], "attnlens: invalid value for '--log-level': 'loud' is not one of"),
    ],
)
def test_usage_error_is_one_line_with_exit_code_2(run: Run, args: list[str], line: str) -> None:
    result = run(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_missing_server_is_reported_in_one_line_with_the_remedy(run: Run) -> None:
    result = run("info", "--address", "127.0.0.1:1", "--timeout-s", "5")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(
        "attnlens info: no server answers at 127.0.0.1:1: start one with `attnlens serve"
    )


def test_debug_shows_the_traceback_before_the_line(run: Run) -> None:
    for args, env in ((["--debug"], {}), ([], {"ATTNLENS_DEBUG": "1"})):
        result = run(*args, "info", "--address", "127.0.0.1:1", "--timeout-s", "0.1", env=env)
        assert result.returncode == 1
        assert "Traceback" in result.stderr
        assert "DeadlineExceededError" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("attnlens info: no server reachable")


def test_bug_is_reported_as_a_bug(run: Run) -> None:
    broken = _program(
        "import click, attnlens_cli.commands.asking.info as module",
        "module.info = click.command()(lambda: 1 / 0)",
    )
    _assert_one_line(
        run("info", command=broken),
        70,
        "attnlens info: this is a bug: ZeroDivisionError: division by zero "
        "(run `attnlens --debug ...` to see the traceback)",
    )
    assert "Traceback" in run("--debug", "info", command=broken).stderr


def test_interrupt_is_reported_with_its_own_exit_code(run: Run) -> None:
    stopped = _program(
        "import click, attnlens_cli.commands.asking.info as module",
        "def stop(): raise KeyboardInterrupt",
        "module.info = click.command()(stop)",
    )
    result = run("info", command=stopped)
    assert result.returncode == 130
    assert result.stderr.strip() == "attnlens info: interrupted"


@pytest.mark.parametrize("module", ["click", "rich"])
def test_base_install_names_the_extra_for_the_command_line(run: Run, module: str) -> None:
    result = run("--help", command=_program(f"sys.modules['{module}'] = None"))
    _assert_one_line(
        result,
        2,
        "attnlens: the command line is not installed: in a checkout of attnlens, pip install '.[cli]'",
    )


@pytest.mark.parametrize(
    ("missing", "args", "extra"),
    [
        ("onnxruntime", ["serve", "x"], "server"),
        ("grpc_health", ["serve", "x"], "server"),
        ("onnxruntime", ["bench", "x"], "server"),
        ("torch", ["export", ".", "--output", "x"], "export"),
        ("safetensors", ["serve", "x"], "server"),
    ],
)
def test_missing_module_names_its_extra(
    run: Run, missing: str, args: list[str], extra: str, tmp_path: Path
) -> None:
    result = run(*args, command=_program(f"sys.modules['{missing}'] = None"), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr == (
        f"attnlens {args[0]}: {missing} is not installed: in a checkout of attnlens, pip "
        f"install '.[{extra}]'\n"
    )


def test_readme_installs_the_extras_named_in_messages() -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    for extra in ("cli", "export", "plot", "server"):
        assert f"pip install '.[{extra}]'" in page or f"`[{extra}]`" in page
        assert f"pip install '.[{extra}]'" in how_to_install(extra)


def test_command_line_overrides_environment_overrides_file(
    run: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    file = tmp_path / "attnlens.toml"
    file.write_text('log-level = "error"\n[info]\naddress = "127.0.0.1:1"\ntimeout-s = 0.1\n')
    args = ("--config-file", file, "info", "--json")
    right, wrong, slow = server.address, "127.0.0.1:2", ("--timeout-s", "60")
    assert "127.0.0.1:1" in run(*args).stderr
    assert run(*args, *slow, env={"ATTNLENS_INFO_ADDRESS": right}).returncode == 0
    assert wrong in run(*args, env={"ATTNLENS_INFO_ADDRESS": wrong}).stderr
    assert run(*args, *slow, "--address", right, env={"ATTNLENS_INFO_ADDRESS": wrong}).returncode == 0
    file.write_text(f'[info]\naddress = "{right}"\n')
    assert run(*args).returncode == 0
    assert run("info", env={"ATTNLENS_CONFIG_FILE": str(file)}).returncode == 0


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            "[info]\nadress = 'x'",
            "no such option adress in table [info] of the configuration file (did you mean address?)",
        ),
        ("[inof]\n", "no such command [inof] (did you mean info?)"),
        ("[quux]\n", "no such command [quux]\n"),
        ("log-levle = 'info'", "(did you mean log-level?)"),
        ("[info]\ntimeout-s = 'soon'", "'soon' is not a valid float"),
        ("[info", "is not valid TOML"),
    ],
)
def test_error_in_the_configuration_file_is_reported(
    run: Run, content: str, line: str, tmp_path: Path
) -> None:
    file = tmp_path / "attnlens.toml"
    file.write_text(content)
    result = run("--config-file", file, "info")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert line in result.stderr


def test_grpc_logging_is_disabled_unless_configured(run: Run) -> None:
    program = (
        "import atexit, os; atexit.register(lambda: print(os.environ['GRPC_VERBOSITY'])); "
        "from attnlens_cli.main import main; main()"
    )
    program_words = ["-c", program]
    assert run("--version", command=[sys.executable, *program_words]).stdout.endswith("\nNONE\n")
    chosen = run("--version", command=[sys.executable, *program_words], env={"GRPC_VERBOSITY": "ERROR"})
    assert chosen.stdout.endswith("\nERROR\n")


def test_true_is_not_a_value_for_an_option_of_the_configuration_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "attnlens.toml"
    file.write_text("[info]\ntimeout-s = true\n")
    result = run("--config-file", file, "info")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "timeout-s in table [info] of the configuration file requires a value, not true" in result.stderr
