"""Measures the memory of an export: `python -m bench.studies.export_memory MINILM [--layers 28]`.

Exports random weights with the shapes of Qwen3-Embedding-0.6B and the tokenizer of MiniLM, and compares the
peak with the need that an export states before it loads a checkpoint. The peak is that of the resident memory
of the process and of its children, which share some of it. Exit code 1 if it is larger. Requires Linux.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from attnlens_export.judge.question import export_bytes
from bench.made.checkpoint import update_json

SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_669,
    "max_position_embeddings": 32_768,
}
COPIED = ("modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        write(checkpoint, arguments.minilm, arguments.layers)
        need = export_bytes(checkpoint)
        command = [sys.executable, "-m", "attnlens_cli.main", "export", str(checkpoint)]
        with subprocess.Popen([*command, "--output", str(Path(directory) / "bundle")]) as process:
            peak = 0
            while process.poll() is None:
                peak = max(peak, resident_bytes(process.pid))
                time.sleep(0.05)
        print(f"peak {peak / 1e9:.2f} GB, need {need / 1e9:.2f} GB, exit code {process.returncode}")
        sys.exit(process.returncode or int(peak > need))


def write(checkpoint: Path, minilm: Path, num_layers: int) -> None:
    """Write random weights, and the files of MiniLM for sentence-transformers."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(num_hidden_layers=num_layers, **SHAPES)
    transformers.Qwen3Model(config).save_pretrained(checkpoint)
    for name in COPIED:
        shutil.copy(minilm / name, checkpoint / name)
    shutil.copytree(minilm / "1_Pooling", checkpoint / "1_Pooling")
    update_json(checkpoint / "1_Pooling" / "config.json", word_embedding_dimension=SHAPES["hidden_size"])


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        tasks = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return 0
    own = sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return own + sum(resident_bytes(int(child)) for children in tasks for child in children)


if __name__ == "__main__":
    main()
