"""Generates the size, time and loss tables of attention reductions in docs/views.md.

    python -m bench.studies.views --address HOST:PORT

Requires a server with all-MiniLM-L6-v2 and `--max-tokens 512`. Texts are concatenated passages.
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
    parser = argparse.ArgumentParser(description="Measure sizes, times and losses of attention reductions.")
    parser.add_argument("--address", required=True, help="Server address as HOST:PORT.")
    with Client(parser.parse_args().address) as client:
        texts = {length: _texts(client, length) for length in LENGTHS}
        print("kB per text, and time relative to full maps")
        for name, query in QUERIES.items():
            cells = [_size_and_time(client, texts[length][0], query) for length in LENGTHS]
            print(f"| {name} | {' | '.join(cells)} |")
        print("omitted share of a row, mean over all rows, heads and layers")
        for name in ("top 8", "threshold 0.01", "threshold 0.001"):
            shares = [_omitted_share(client, texts[length], QUERIES[name]) for length in LENGTHS]
            print(f"| {name} | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |")
        print("attention share of special tokens, by layer")
        for length in LENGTHS:
            query = QUERIES["without special tokens"]
            by_layer = np.mean(
                [_special_token_share(text) for text in _encode(client, texts[length], query)], axis=0
            )
            print(f"| {length} | {' | '.join(f'{100 * share:.0f} %' for share in by_layer)} |")


def _texts(client: Client, length: int) -> list[str]:
    """Return texts with as many words as fit into `length` tokens."""
    lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    prose = [json.loads(line)["text"] for line in lines]
    texts = []
    for index in range(NUM_TEXTS):
        words = " ".join(prose[index * 40 : index * 40 + 40]).split()
        low, high = 1, len(words)
        while low < high:  # binary search for the maximum number of words
            middle = (low + high + 1) // 2
            [tokenized] = client.tokenize([" ".join(words[:middle])])
            low, high = (middle, high) if len(tokenized.tokens) <= length else (low, middle - 1)
        texts.append(" ".join(words[:low]))
    return texts


def _encode(client: Client, texts: list[str], query: AttentionQuery) -> list[EncodedText]:
    return list(client.encode_stream(texts, attention=query, last_hidden_state=False))


def _size_and_time(client: Client, text: str, query: AttentionQuery) -> str:
    """Return the size in kB and the shortest time relative to full maps."""
    times: dict[str, list[float]] = {"query": [], "full": []}
    for _ in range(REPEATS):  # alternate so that noise affects both
        for name, timed_query in (("query", query), ("full", AttentionQuery())):
            started = time.perf_counter()
            [result] = _encode(client, [text], timed_query)
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


def _omitted_share(client: Client, texts: list[str], query: AttentionQuery) -> float:
    attentions = [text.attention[0] for text in _encode(client, texts, query)]
    if attentions[0].layout == "top_k":
        return float(np.mean([attention.top_k.remaining_mass.mean() for attention in attentions]))
    return float(np.mean([1 - attention.sparse.kept_mass.mean() for attention in attentions]))


def _special_token_share(text: EncodedText) -> np.ndarray:
    mass = text.attention[0].special_token_mass
    return np.zeros(0) if mass is None else np.asarray(mass.mean(axis=(1, 2)))


if __name__ == "__main__":
    main()
