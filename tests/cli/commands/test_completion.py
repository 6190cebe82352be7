"""`attnlens completion` scripts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

# Completes the last of the following words as bash does, and prints the candidates.
COMPLETE = """
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
compopt() { :; }
_attnlens_completion attnlens
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def offered(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return the completions of bash for a line, using the script printed by the command."""
    script = tmp_path_factory.mktemp("completion") / "attnlens.bash"
    printed = run("completion", "bash")
    assert (printed.returncode, printed.stderr) == (0, "")
    script.write_text(printed.stdout)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def complete(*words: str) -> list[str]:
        command = ["bash", "--norc", "-euc", COMPLETE, "bash", str(script), "attnlens", *words]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("att",), ["attend"]),
        (("attend", '"It rained."', "--la"), ["--layer"]),
        (("attend", '"It rained."', "--scale", ""), ["sqrt", "linear"]),
        (("attend", '"It rained."', "--layer", "m"), ["mean"]),
        (("completion", "f"), ["fish"]),
        (("nonsense", "--ver"), ["--version"]),
    ],
)
def test_bash_completes_commands_options_and_values(
    offered: Callable[..., list[str]], words: tuple[str, ...], expected: list[str]
) -> None:
    assert offered(*words) == expected


@pytest.mark.parametrize(
    ("shell", "start"), [("zsh", "#compdef attnlens\n"), ("fish", "function _attnlens_")]
)
def test_scripts_of_other_shells_are_printed(run: Run, shell: str, start: str) -> None:
    printed = run("completion", shell)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.startswith(start)


def test_unknown_shell_is_a_usage_error(run: Run) -> None:
    result = run("completion", "tcsh")
    assert (result.returncode, result.stdout) == (2, "")
    assert "'tcsh' is not one of" in result.stderr
