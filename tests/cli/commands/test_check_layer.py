"""`attnlens check-layer`: loading of layers, exit codes and output."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

EXAMPLES = Path(__file__).parents[3] / "examples" / "attention_pitfalls.py"
LAYER = '''
import math
import torch
from torch import nn


class Head(nn.Module):
    """A single head whose causal mask has the wrong size, and whose scale is that of another dimension."""

    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(head_size, head_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        num_tokens, num_channels = x.shape[1:]
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * num_channels**-0.5
        scores = scores.masked_fill(self.tril[:num_tokens, :num_tokens] == 0, -math.inf)
        return self.dropout(scores.softmax(-1)) @ self.value(x)


class NeedsConfig(nn.Module):
    def __init__(self, config):
        super().__init__()


class NeedsEvenSize(nn.Module):
    def __init__(self, d_model):
        raise ValueError(f"{d_model} is odd")


class Block(nn.Module):
    """Pre-norm attention and a residual connection, with a parameter name that is not recognized."""

    def __init__(self, d_model, h=8):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, h, batch_first=True)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed)[0]


def make():
    return nn.MultiheadAttention(64, 4, batch_first=True)


INSTANCE = make()
NUMBER = 3


def number():
    return NUMBER


def reference(states):
    return INSTANCE(states, states, states)[0]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "my_layer.py"
    path.write_text(LAYER)
    return path


def test_correct_layer_exits_0_and_lists_all_checks(run: Run) -> None:
    result = run("check-layer", f"{EXAMPLES}:CausalSelfAttention", "--causal")
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("CausalSelfAttention: 0 of 17 checks failed\n")
    assert "passed   causal mask            no effect of later tokens, in gradients" in result.stdout


def test_docs_pitfalls_md_shows_the_output(run: Run) -> None:
    page = (EXAMPLES.parents[1] / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    block = page.partition("attention_pitfalls.py:NoScaling\n")[2].partition("\n\n")[0]
    shown = [line.removeprefix("    ") for line in block.splitlines() if not line.endswith("...")]
    assert len(shown) == 4
    assert set(shown) <= set(run("check-layer", f"{EXAMPLES}:NoScaling").stdout.splitlines())


def test_mistakes_exit_1_with_meaning_and_fix(run: Run, file: Path) -> None:
    result = run("check-layer", f"{file}:Head", "--causal", "--arg", "head_size=16")
    assert result.returncode == 1
    assert result.stdout.startswith("Head: 2 of 17 checks failed\n")
    assert "T = 17 fails (the layer has the buffer `tril` (16, 16))" in result.stdout
    assert "failed   scaling                0.125 instead of 1 / sqrt(16) = 0.25" in result.stdout
    assert (
        "Fix: Divide scores by the square root of the head size, K, not of the hidden size." in result.stdout
    )


def test_json_lists_all_checks(run: Run, file: Path) -> None:
    result = run("check-layer", f"{file}:make", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert report["passed"]
    assert {item["status"] for item in report["items"]} <= {"passed", "skipped"}
    assert set(report["items"][0]) == {"name", "status", "measured", "meaning", "remedy"}


def test_instance_and_reference_are_used(run: Run, file: Path) -> None:
    result = run("check-layer", f"{file}:INSTANCE", "--trained", "--reference", f"{file}:reference")
    assert result.returncode == 0, result.stdout
    assert "passed   reference" in result.stdout


def test_number_of_heads_is_not_checked_if_it_is_unknown(run: Run, file: Path) -> None:
    result = run("check-layer", f"{file}:Block")
    assert result.returncode == 0, result.stdout
    assert "heads                  8, all different" in result.stdout


def test_default_sizes_follow_parameter_names(run: Run, file: Path) -> None:
    result = run("check-layer", f"{file}:Head", "--causal", "--hidden-size", "48", "--num-heads", "3")
    assert "buffer `tril` (16, 16)" in result.stdout


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NeedsConfig", (), "needs config: give --arg config=VALUE, or name a function without arguments"),
        ("NeedsEvenSize", (), "NeedsEvenSize(d_model=64) failed: ValueError: 64 is odd"),
        ("NUMBER", (), "is not a module, a class or a function"),
        ("number", (), "returned int: return a torch.nn.Module"),
        ("absent", (), "has no absent"),
        ("make", ("--arg", "bias=true"), "has no parameter bias"),
        ("INSTANCE", ("--arg", "bias=true"), "is an instance: --arg needs a class or a function"),
        ("Head", ("--arg", "bias"), "'bias' is not NAME=VALUE, such as bias=false"),
    ],
)
def test_unusable_target_is_reported(
    run: Run, file: Path, name: str, options: tuple[str, ...], message: str
) -> None:
    result = run("check-layer", f"{file}:{name}", *options)
    assert result.returncode in {1, 2}
    assert message in result.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("layer.py", "'layer.py' is not FILE.py:NAME, such as my_layer.py:SelfAttention"),
        ("absent.py:Head", "there is no file absent.py"),
    ],
)
def test_invalid_target_is_rejected(run: Run, target: str, message: str) -> None:
    result = run("check-layer", target)
    assert result.returncode == 2
    assert message in result.stderr


def test_failing_file_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    result = run("check-layer", f"{path}:Head")
    assert result.returncode == 1
    assert f"{path} failed: ModuleNotFoundError: No module named 'nothing_of_this_name'" in result.stderr
