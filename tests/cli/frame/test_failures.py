"""Errors for common mistakes contain the remedy."""

import os
import pty
import subprocess
from collections.abc import Callable

import pytest

RunHere = Callable[..., tuple[int, str, str]]

_NO_FILE = "embed: invalid value for '[INPUT]...': File 'It rained.' does not exist"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("info", "--debug"), "info: no such option --debug: it goes before the command, as in `attn"),
        (("info", "--config-file", "x"), "info: no such option --config-file: it goes before the command"),
        (("info", "--adress", "x"), "info: no such option --adress (did you mean --address?)"),
        (("try", "It rained."), "try: missing argument 'TEXT...': use a bundle or"),
        (("compare", "It rained."), "compare: missing argument 'TEXT': it compares two texts"),
        (("embed", "It rained."), f"{_NO_FILE}: use a file with one text per line, or embed a single text"),
    ],
)  # fmt: skip
def test_common_mistake_is_reported_in_one_line_with_its_remedy(
    run_here: RunHere, args: tuple[str, ...], line: str
) -> None:
    code, out, err = run_here(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"attnlens {line}")


def test_embed_without_a_file_announces_in_a_terminal_that_it_reads_stdin(
    run_process: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    terminal, child_end = pty.openpty()
    args = ("embed", "--address", "127.0.0.1:1", "--timeout-s", "0.1")
    on_terminal = run_process(*args, stdin=child_end)
    os.close(child_end)
    os.close(terminal)
    told = "Reading standard input, one text per line. Ctrl-D ends it.\n"
    assert on_terminal.stderr == told + run_process(*args).stderr
