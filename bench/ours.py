"""Runs the attnlens engine in-process, without gRPC.

    python -m bench.ours BUNDLE (onnxruntime|openvino) PRECISION THREADS MAX_TOKENS

Texts are tokenized in chunks and submitted to the engine's queue while earlier texts are running.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from attnlens.pooling import normalize
from attnlens_server.bundle import Kind, open_bundle
from attnlens_server.config import EngineName, Precision, ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, ItemResult, RequestedOutput, TokenPooling
from attnlens_server.engine.engine import Lanes
from attnlens_server.text import TextEncoder
from bench.lines import Response, serve_lines
from bench.peers.timing import timed

CHUNK_SIZE = 64  # texts tokenized at a time
MAX_WAITING = 512  # limits the number of results in memory


class InProcess:
    """A running engine."""

    def __init__(self, config: ServerConfig) -> None:
        self._bundle = open_bundle(config.bundle, config.precision)
        self._engine = Engine(self._bundle, config)
        assert config.max_tokens is not None
        self._max_tokens = config.max_tokens
        assert self._bundle.tokenizer_path is not None
        self._text_encoder = TextEncoder(self._bundle.tokenizer_path, self._max_tokens)
        self._engine.start(self._max_tokens)

    @property
    def lanes(self) -> Lanes:
        """Lanes of the embeddings graph."""
        return self._engine.lanes["embeddings"]

    def run(self, texts: list[str], what: str, _batch_size: int) -> list[Any]:
        """Return the result of each text. For attention, only the shapes, to bound memory."""
        finish = self._finish(what)
        return [finish(result) for result in self._results(texts, what, MAX_WAITING)]

    def count_tokens(self, texts: list[str], max_waiting: int) -> Response:
        """Run texts with at most `max_waiting` in the queue and count live and computed tokens."""
        lanes = self.lanes
        live, computed = lanes.num_live_tokens, lanes.num_computed_tokens
        for _ in self._results(texts, "embed", max_waiting):
            pass
        return {
            "live_tokens": lanes.num_live_tokens - live,
            "computed_tokens": lanes.num_computed_tokens - computed,
        }

    def _results(self, texts: list[str], what: str, max_waiting: int) -> Iterator[ItemResult]:
        requested = self._requested(what)
        kind: Kind = "attention" if what.startswith("attention") else "embeddings"
        waiting: deque[Item] = deque()
        for start in range(0, len(texts), CHUNK_SIZE):
            chunk = self._text_encoder.encode([(text,) for text in texts[start : start + CHUNK_SIZE]])
            for encoded in chunk:
                item = Item(encoded.input_ids, requested)
                self._engine.submit([item], kind=kind)
                waiting.append(item)
                if len(waiting) >= max_waiting:
                    yield waiting.popleft().future.result()
        while waiting:
            yield waiting.popleft().future.result()

    def _requested(self, what: str) -> tuple[RequestedOutput, ...]:
        model = self._bundle.model
        if not what.startswith("attention"):
            pooling = TokenPooling(model.pooling) if what == "embed" else None
            return (RequestedOutput(model.outputs.hidden_state("embeddings").name, keep=pooling),)
        outputs = [output for output in model.graphs["attention"].outputs if output.num_heads]
        selection = HeadSelection(is_mean=what == "attention mean")
        chosen = outputs[-1:] if selection.is_mean else outputs
        return tuple(RequestedOutput(output.name, output.layout, selection) for output in chosen)

    def _finish(self, what: str) -> Callable[[ItemResult], Any]:
        def embed(result: ItemResult) -> Any:  # noqa: ANN401 - an array
            [vector] = result.arrays
            return normalize(vector[np.newaxis])[0] if self._bundle.model.normalize else vector

        return {
            "embed": embed,
            "tokens": lambda result: result.arrays[0],
            "attention": lambda result: [maps.shape for maps in result.arrays],
            "attention mean": lambda result: list(result.arrays),
        }[what]


def main() -> None:
    directory, engine_name, precision, threads, max_tokens = sys.argv[1:]
    config = ServerConfig(
        bundle=Path(directory),
        provider="cpu",
        engine=cast("EngineName", engine_name),
        precision=cast("Precision", precision),
        threads=int(threads),
        max_tokens=int(max_tokens),
    )
    engine = InProcess(config)
    run = timed(engine.run)

    def handle(max_waiting: int = 0, **request: Any) -> Response:  # noqa: ANN401 - see timed()
        return engine.count_tokens(request["texts"], max_waiting) if max_waiting else run(**request)

    serve_lines(handle, versions={engine_name: version(engine_name)})


if __name__ == "__main__":
    main()
