"""`attnlens teach` and `attnlens profile` on MiniLM."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from schemas import conforms

pytest.importorskip("onnx")  # installed by the extra `export`

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "The animal didn't cross the street because it was too tired."
WITHOUT_ONNX = "import sys; sys.modules['onnx'] = None; from attnlens_cli.main import main; main()"


def test_lesson_is_printed(run: Run, minilm_bundle: Path) -> None:
    given = ("--token", "it", "--layer", "3", "--head", "-11", "--no-cost")
    result = run("teach", minilm_bundle, SENTENCE, *given)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("How “it” attends in layer 3, head 1 of all-MiniLM-L6-v2\n")
    assert "animal  21.6876 ████" in result.stdout
    assert "\n19. " in result.stdout
    assert "\n20. " not in result.stdout
    assert f'attnlens teach {minilm_bundle} "{SENTENCE}" --token it' in result.stdout
    assert "--token it --layer 3 --head 1 --npz head.npz" in result.stdout
    assert "--token it --layer 3 --head 2\n" in result.stdout


def test_output_files_replace_the_printed_lesson_and_contain_the_head(
    run: Run, minilm_bundle: Path, tmp_path: Path
) -> None:
    files = [tmp_path / f"it{suffix}" for suffix in (".md", ".html", ".npz")]
    options = [f"--{name}={file}" for name, file in zip(("markdown", "html", "npz"), files, strict=True)]
    asked = ("--token", "it", "--to", "animal", "--rather-than", "tired", "--no-cost")
    result = run("teach", minilm_bundle, SENTENCE, *asked, *options)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (0, "", 3)
    assert "than to “tired”" in files[0].read_text("utf-8")
    ET.fromstring(files[1].read_text("utf-8").partition("\n")[2])
    with np.load(files[2]) as arrays:
        head = dict(arrays)
    scores = head["scale"] * head["q"] @ head["k"].T + head["bias"]
    np.testing.assert_allclose(scores, head["scores"], atol=1e-4)
    powers = np.exp(head["scores"][10])
    np.testing.assert_allclose(powers / powers.sum(), head["weights"][10], atol=1e-6)
    np.testing.assert_allclose(head["weights"] @ head["v"], head["context"], atol=1e-5)
    assert head["weights"][10, 2] == pytest.approx(0.6768, abs=5e-5)
    assert head["tokens"][10] == "it"
    assert "it.npz" in files[0].read_text("utf-8")


def test_interactive_page_needs_no_token(run: Run, minilm_bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("teach", minilm_bundle, SENTENCE, "--interactive", page)
    assert (result.returncode, result.stdout) == (0, "")
    size = page.stat().st_size / 1e6
    assert result.stderr == f"{page}: {size:.2f} MB, open it in a browser\n"
    assert "<title>Attention step by step: The animal" in page.read_text("utf-8")
    lesson = tmp_path / "it.md"
    both = ("--interactive", page, "--markdown", lesson, "--token", "it", "--no-cost")
    result = run("teach", minilm_bundle, SENTENCE, *both)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (0, "", 2)
    assert lesson.read_text("utf-8").startswith("# How “it” attends")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((SENTENCE, "--interactive", "page.txt"), "page.txt must end in .html"),
        ((SENTENCE, "--interactive", "a.html", "--npz", "a.npz"), "missing option '--token'"),
        ((SENTENCE, "--interactive", "a.html", "--to", "it"), "--to, --rather-than and --contexts need"),
        (("word " * 80, "--interactive", "a.html"), "82 tokens, but an interactive page can have up to 64"),
        ((SENTENCE,), "missing option '--token'"),
        ((SENTENCE, "--token", "dog"), "no token or word 'dog' in: [CLS] the animal"),
        ((SENTENCE, "--token", "the"), "'the' is ambiguous. Use one of the token indices 1, 7"),
        ((SENTENCE, "--token", "it", "--layer", "9"), "layer 9 does not exist. Use 0 to 5, or -6 to -1"),
        ((SENTENCE, "--token", "it", "--html", "it.txt"), "it.txt must end in .html"),
        ((b"\xff", "--token", "it"), "it is not UTF-8"),
    ],
)
def test_invalid_teach_option_is_reported_in_one_line(
    run: Run, minilm_bundle: Path, args: tuple[str, ...], message: str
) -> None:
    result = run("teach", minilm_bundle, *args, "--no-cost")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


@pytest.mark.parametrize("args", [("teach", SENTENCE, "--token", "it"), ("profile",)])
def test_both_commands_name_the_extra_that_installs_onnx(
    run: Run, minilm_bundle: Path, args: tuple[str, ...]
) -> None:
    command, *rest = args
    extra = ("--lengths", "16") if command == "profile" else ()
    result = run(command, minilm_bundle, *rest, *extra, command=[sys.executable, "-c", WITHOUT_ONNX])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"attnlens {command}: onnx is not installed: in a checkout of attnlens, pip install '.[export]'\n"
    )


def test_profile_is_a_table_or_json_and_a_chart(run: Run, minilm_bundle: Path, tmp_path: Path) -> None:
    table = run("profile", minilm_bundle, "--lengths", "16..40", env={"COLUMNS": "80"})
    assert table.returncode == 0
    # The warning is right where other tests compete for the CPU; nothing else is printed.
    assert re.fullmatch(
        r"(Unreliable: at [\d, ]+ tokens the runs disagree on shares .* idle machine\.\n)?", table.stderr
    )
    assert table.stdout.startswith("all-MiniLM-L6-v2, fp32, attention softmax, 1 thread; share")
    rows = [line.split() for line in table.stdout.splitlines() if line.strip()[:2].isdigit()]
    assert [row[0] for row in rows][:2] == ["16", "32"]
    assert sum(float(share) for share in rows[0][2:9]) == pytest.approx(100, abs=0.4)
    files = [tmp_path / "chart.svg", tmp_path / "page.html"]
    asked = ("--lengths", "16,600", "--json", "--svg", files[0], "--html", files[1])
    result = run("profile", minilm_bundle, *asked)
    assert result.returncode == 0
    assert "skipped 600 tokens: all-MiniLM-L6-v2 supports up to 512" in result.stderr
    content = conforms("profile", result.stdout)
    [length] = content["lengths"]
    assert (length["length"], content["attention_overtakes_at"]) == (16, None)
    assert sum(length["shares"].values()) == pytest.approx(1)
    for file in files:
        ET.fromstring(file.read_text("utf-8").replace("<!DOCTYPE html>\n", ""))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("0..9", "invalid lengths '0..9'"),
        ("600..4096", "no length can be measured (skipped 600, 1,200, 2,400"),
    ],
)
def test_invalid_lengths_are_rejected(run: Run, minilm_bundle: Path, lengths: str, message: str) -> None:
    result = run("profile", minilm_bundle, "--lengths", lengths)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
