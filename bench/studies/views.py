"""What reductions of attention take, and what they leave out: the tables of docs/views.md.

    python -m bench.studies.views --address HOST:PORT

The server has all-MiniLM-L6-v2 and `--max-tokens 512`. Texts are passages of prose, joined, of at most T
tokens.
"""

import argparse
import json
import time
from collections.abc import Mapping

import numpy as np

from attnlens.reductions import AttentionReduction, SqrtUint8, Statistics, Threshold, TopK
from attnlens_client import AttentionQuery, Client, EncodedText
from bench.workloads import DATA

LENGTHS = (128, 256, 512)
NUM_TEXTS = 4
QUERIES: Mapping[str, AttentionQuery] = {
    "full maps": AttentionQuery(),
    "head mean": AttentionQuery(view="head_mean"),
    "layer mean": AttentionQuery(reduction=AttentionReduction(layers="mean")),
    "both means": AttentionQuery(view="head_mean", reduction=AttentionReduction(layers="mean")),
    "one row": AttentionQuery(reduction=AttentionReduction(rows=[0])),
    "words": AttentionQuery(reduction=AttentionReduction(level="words")),
    "without special tokens": AttentionQuery(reduction=AttentionReduction(special_tokens="drop")),
    "words, both means": AttentionQuery(
        view="head_mean", reduction=AttentionReduction(level="words", layers="mean")
    ),
    "rollout": AttentionQuery(reduction=AttentionReduction(layers="rollout")),
    "rollout, mean of rows": AttentionQuery(
        reduction=AttentionReduction(layers="rollout", mean_over_rows=True)
    ),
    "received": AttentionQuery(reduction=AttentionReduction(form=Statistics(received=True))),
    "entropy": AttentionQuery(reduction=AttentionReduction(form=Statistics(entropy=True))),
    "top 8": AttentionQuery(reduction=AttentionReduction(form=TopK(8))),
    "threshold 0.01": AttentionQuery(reduction=AttentionReduction(form=Threshold(0.01))),
    "threshold 0.001": AttentionQuery(reduction=AttentionReduction(form=Threshold(0.001))),
    "8 bits": AttentionQuery(reduction=AttentionReduction(form=SqrtUint8())),
}
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Sizes, times and losses of reductions of attention.")
    parser.add_argument("--address", required=True)
    with Client(parser.parse_args().address) as client:
        texts = {length: _texts(client, length) for length in LENGTHS}
        print("kB of a text, and time beside that of the full maps")
        for name, query in QUERIES.items():
            cells = [_size_and_time(client, texts[length][0], query) for length in LENGTHS]
            print(f"| {name} | {' | '.join(cells)} |")
        print("share of a row left out, mean of all rows, heads and layers")
        for name in ("top 8", "threshold 0.01", "threshold 0.001"):
            shares = [_left_out(client, texts[length], QUERIES[name]) for length in LENGTHS]
            print(f"| {name} | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |")
        print("share that rows give to special tokens, by layer")
        for length in LENGTHS:
            query = QUERIES["without special tokens"]
            by_layer = np.mean([_special(text) for text in _encode(client, texts[length], query)], axis=0)
            print(f"| {length} | {' | '.join(f'{100 * share:.0f} %' for share in by_layer)} |")


def _texts(client: Client, length: int) -> list[str]:
    """Return texts of at most `length` tokens: of as many words as fit."""
    lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    prose = [json.loads(line)["text"] for line in lines]
    texts = []
    for number in range(NUM_TEXTS):
        words = " ".join(prose[number * 40 : number * 40 + 40]).split()
        low, high = 1, len(words)
        while low < high:  # the most words of which T is not over the length
            middle = (low + high + 1) // 2
            [told] = client.tokenize([" ".join(words[:middle])])
            low, high = (middle, high) if len(told.tokens) <= length else (low, middle - 1)
        texts.append(" ".join(words[:low]))
    return texts


def _encode(client: Client, texts: list[str], query: AttentionQuery) -> list[EncodedText]:
    return list(client.encode_stream(texts, attention=query, last_hidden_state=False))


def _size_and_time(client: Client, text: str, query: AttentionQuery) -> str:
    """Return kB of one text's attention, and the least time of several beside that of the full maps."""
    times: dict[str, list[float]] = {"query": [], "full": []}
    for _ in range(REPEATS):  # in turn, so that both see the same machine
        for name, asked in (("query", query), ("full", AttentionQuery())):
            started = time.perf_counter()
            [result] = _encode(client, [text], asked)
            times[name].append(time.perf_counter() - started)
            if name == "query":
                size = _num_bytes(result)
    return f"{size / 1000:.1f} (x{min(times['query']) / min(times['full']):.2f})"


def _num_bytes(result: EncodedText) -> int:
    attention = result.attention[0]
    arrays = [attention.weights, attention.special_token_mass]
    if attention.reduced is not None:
        arrays += [getattr(attention.reduced, name) for name in attention.reduced.__slots__]
    return sum(array.nbytes for array in arrays if array is not None)


def _left_out(client: Client, texts: list[str], query: AttentionQuery) -> float:
    found = [text.attention[0] for text in _encode(client, texts, query)]
    if found[0].layout == "top_k":
        return float(np.mean([each.top_k.remaining_mass.mean() for each in found]))
    return float(np.mean([1 - each.sparse.kept_mass.mean() for each in found]))


def _special(text: EncodedText) -> np.ndarray:
    mass = text.attention[0].special_token_mass
    return np.zeros(0) if mass is None else np.asarray(mass.mean(axis=(1, 2)))


if __name__ == "__main__":
    main()
