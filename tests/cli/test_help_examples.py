"""All examples in help texts run unchanged, in a directory with the files that they mention.

Only addresses, ports and hub ids are replaced. The example of `export` creates a small bundle
from a checkpoint with random weights; examples that call a server use MiniLM.
"""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from attnlens_cli.app import COMMANDS, LazyGroup, attnlens, run
from commands_here import process_as_before
from odd_models import OddModel
from served import ServerProcess
from small_bundles import TOKENIZERS
from small_files import write_pooling_files

pytestmark = pytest.mark.extended  # each command has its own tests

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 130,
    "vocab_size": 400,
}
FRESH = {
    "family": "attnlens",
    "hidden_size": 16,
    "num_layers": 1,
    "embeddings": {"vocab_size": 40},
    "positions": {"max_position_embeddings": 24},
    "attention": {"kind": "softmax", "num_heads": 2},
    "feed_forward": {"intermediate_size": 16},
}
SENTENCES = [f"The animal was too tired on day {day}." for day in range(12)]
TREE = [("The", "DET", 2, "det"), ("animal", "NOUN", 3, "nsubj"), ("slept", "VERB", 0, "root")]
# Environment variables that limit the work of an example.
BOUNDS = {
    "ATTNLENS_BENCH_COMPARE": "0",  # commands/test_bench.py compares engines
    "ATTNLENS_BENCH_SECONDS": "0.01",
    "ATTNLENS_CHECK_PARITY_TOKENS": "4",
    "ATTNLENS_EXPORT_PARITY_TOKENS": "4",
    "ATTNLENS_HEADS_IMPORTANCE_TEXTS": "2",
    "ATTNLENS_HEADS_THREADS": "1",
}

ROOT = Path(__file__).parents[2]


def _command(name: str) -> click.Command:
    """Return a command, or the root command for the program name."""
    if name == "attnlens":
        return attnlens
    assert isinstance(attnlens, LazyGroup)
    found = attnlens.get_command(click.Context(attnlens), name)
    assert found is not None
    return found


def _examples(name: str) -> list[str]:
    """Return the lines below "Example:" in the help of a command."""
    text = (_command(name).epilog or "").replace("\\\n", " ").partition("Example:\n")[2]
    return [line.strip() for line in text.partition("\n\n")[0].splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files in examples, and a small checkpoint instead of one on the hub."""
    folder = tmp_path_factory.mktemp("examples")
    OddModel("Bert", SMALL).make().save_pretrained(folder / "checkpoint")
    shutil.copytree(TOKENIZERS / "wordpiece", folder / "checkpoint", dirs_exist_ok=True)
    write_pooling_files(folder / "checkpoint", 96)
    (folder / "my.json").write_text(json.dumps(FRESH))
    for name in ("sentences.txt", "texts.txt", "passages.txt"):
        (folder / name).write_text("".join(f"{text}\n" for text in SENTENCES))
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(SENTENCES)]
    for name in ("texts.jsonl", "passages.jsonl", "reviews.jsonl"):
        (folder / name).write_text("\n".join(lines))
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as corpus:
        corpus.writelines(json.dumps({"text": text}) + "\n" for text in SENTENCES)
    (folder / "my_layer.py").write_text(
        (ROOT / "examples" / "attention_pitfalls.py").read_text()
        + "\n\nLAYER = SelfAttention()\n\ndef make_layer():\n    return LAYER\n"
        + "\n\ndef reference(states):\n    return LAYER(states)[0]\n"
    )
    rows = [f"{first},{second},{score}\n" for first, second, score in (("a", "b", 1), ("c", "c", 5))]
    (folder / "sts-dev.csv").write_text("".join(rows))
    words = [
        f"{at}\t{form}\t_\t{pos}\t_\t_\t{head}\t{relation}\t_\t_\n"
        for at, (form, pos, head, relation) in enumerate(TREE, 1)
    ]
    (folder / "en_ewt-ud-dev.conllu").write_text(("".join(words) + "\n") * 12)
    return folder


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo changes that a command makes to the process."""
    with process_as_before():
        yield


class Examples:
    """Runs example lines in the folder. A line that occurs in several help texts runs once."""

    def __init__(self, folder: Path, address: str) -> None:
        self.replaced = {
            "sentence-transformers/all-MiniLM-L6-v2": str(folder / "checkpoint"),
            "localhost:50051": address,
            "-port 50051": "-port 0",
            "-port 8080": "-port 0",
            " positive ": " art ",
            " neutral": " law",
        }
        # Environments of commands for other types of models, by a part of the line.
        self.environments: dict[str, dict[str, str]] = {}
        self.done: set[str] = set()

    def run(self, line: str) -> None:
        if line in self.done:
            return
        self.done.add(line)
        shown = line
        for written, given in self.replaced.items():
            line = line.replace(written, given)
        assert line.startswith("attnlens ") or " | attnlens " in line, shown
        words = shlex.split(line)
        with pytest.MonkeyPatch.context() as patched:
            for part, environment in self.environments.items():
                for name, value in environment.items() if part in line else ():
                    patched.setenv(name, value)
            self._run(line, words, shown)

    def _run(self, line: str, words: list[str], shown: str) -> None:
        if {"|", ">", "&&"} & set(words):
            command = ["bash", "-c", f"set -euo pipefail; {line}"]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=200)
        elif words[1] == "serve":
            server = ServerProcess(Path(words[2]))
            server.command = [sys.executable, "-m", "attnlens_cli.main", *words[1:]]
            with server:
                assert server.stop() == 0, shown
        else:
            assert run(words[1:]) == 0, shown


@pytest.fixture(scope="module")
def examples(
    folder: Path, minilm_server: ServerProcess, classifier_bundle: Callable[[str], Path]
) -> Iterator[Examples]:
    """Return the runner, after the examples of `export` have created the bundle."""
    examples = Examples(folder, minilm_server.address)
    with (
        pytest.MonkeyPatch.context() as patched,
        ServerProcess(classifier_bundle("reranker")) as reranker,
        ServerProcess(classifier_bundle("topics")) as classifier,
    ):
        examples.environments = {
            "attnlens rerank": {"ATTNLENS_ADDRESS": reranker.address},
            "attnlens classify": {"ATTNLENS_ADDRESS": classifier.address},
            "--label": {"ATTNLENS_ADDRESS": classifier.address},
        }
        patched.chdir(folder)
        patched.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patched.setenv("ATTNLENS_ADDRESS", minilm_server.address)
        for name, value in BOUNDS.items():
            patched.setenv(name, value)
        for line in _examples("export"):
            examples.run(line)
        yield examples


@pytest.mark.parametrize("name", ["attnlens", *COMMANDS])
def test_every_example_of_a_help_runs(name: str, examples: Examples) -> None:
    lines = _examples(name)
    assert lines
    for line in lines:
        examples.run(line)


def test_examples_write_their_output_files(folder: Path, examples: Examples) -> None:
    for line in (line for name in COMMANDS for line in _examples(name)):
        examples.run(line)
    assert (folder / "vectors.jsonl").read_text().count("\n") == len(SENTENCES)
    for name in ("rain.png", "heads.svg", "animal.html", "wet.html", "heads.json", "profile.html"):
        assert (folder / name).stat().st_size > 1000, name
