"""STS benchmark on a running server: Spearman correlation between cosine and human score.

    python -m bench.studies.stsb --address HOST:PORT

Vectors are computed with the `attnlens embed` command.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from bench.workloads import DATA


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the Spearman correlation of a served model on STS-B dev."
    )
    parser.add_argument("--address", required=True, help="Server address as HOST:PORT.")
    print(f"Spearman {spearman(parser.parse_args().address):.5f}")


def spearman(address: str) -> float:
    """Return the Spearman correlation between the cosine of each pair and its score."""
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    sentences = [row[0] for row in rows] + [row[1] for row in rows]
    scores = [float(row[2]) for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        texts, output = Path(directory) / "texts.txt", Path(directory) / "vectors.npy"
        texts.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
        attnlens = Path(sys.executable).parent / "attnlens"
        subprocess.run([attnlens, "embed", texts, "--address", address, "--output", output], check=True)
        vectors = np.load(output)
    left, right = vectors[: len(rows)], vectors[len(rows) :]
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(spearmanr((left * right).sum(axis=1) / lengths, scores).statistic)


if __name__ == "__main__":
    main()
