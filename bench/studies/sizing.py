"""Measures processor time, network bytes and memory per text and method, for docs/sizing.md.

    python -m bench.studies.sizing BUNDLE [--precision fp32] [--texts 256]

A server with one thread processes the passages of the tests, truncated to the limit of the model. Rates are
texts per second of the server's processor time, so other programs on the machine hardly change them. Bytes
are counted between client and server, in both directions, with the framing of gRPC but without TCP.
"""

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnlens_client import AttentionQuery, Client
from bench.lines import ROOT
from bench.servers import attnlens_server

PASSAGES = ROOT / "tests" / "data" / "passages.jsonl"
LOG = Path(".bench/logs/sizing.log")
Method = Callable[[Client, Sequence[str]], object]

METHODS: dict[str, Method] = {
    "`embed`, float32": lambda client, texts: client.embed(texts, truncate=True),
    "`embed`, float16": lambda client, texts: client.embed(texts, truncate=True, dtype="float16"),
    "`embed`, ubinary": lambda client, texts: client.embed(texts, truncate=True, embedding_type="ubinary"),
    "`tokenize`": lambda client, texts: client.tokenize(texts),
    "`encode`, token vectors": lambda client, texts: client.encode(texts, truncate=True),
    "`encode`, attention of the last layer, mean of heads": lambda client, texts: client.encode(
        texts,
        truncate=True,
        last_hidden_state=False,
        attention=AttentionQuery(layers=[-1], view="head_mean"),
    ),
    "`encode`, all attention": lambda client, texts: list(
        client.encode_stream(texts, truncate=True, last_hidden_state=False, attention=AttentionQuery())
    ),
    "`explain`": lambda client, texts: client.explain(texts, truncate=True),
}


class Wire:
    """Forwards connections to an address and counts the bytes of both directions."""

    def __init__(self, address: str) -> None:
        self._target = address.rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = self.received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return
            outgoing = socket.create_connection((self._target[0], int(self._target[1])))
            for source, target, is_request in ((incoming, outgoing, True), (outgoing, incoming, False)):
                threading.Thread(target=self._copy, args=(source, target, is_request), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(1 << 18):
                # Each direction has one thread while one client is connected.
                if is_request:
                    self.sent += len(data)
                else:
                    self.received += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer has closed the connection


@contextmanager
def wire_to(address: str) -> Iterator[Wire]:
    """Forward connections until the block ends."""
    wire = Wire(address)
    try:
        yield wire
    finally:
        wire.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--texts", type=int, default=256)
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in PASSAGES.read_text("utf-8").splitlines()][: arguments.texts]
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (
        attnlens_server(arguments.bundle, arguments.precision, 1, LOG) as server,
        wire_to(server.address) as wire,
        Client(wire.address, timeout_s=None) as client,
    ):
        idle_mib = server.rss_mib
        tokens = sum(usage.num_tokens for usage in client.embed_with_usage(texts, truncate=True).usages)
        print(
            f"{len(texts)} texts, {tokens / len(texts):.0f} tokens and "
            f"{sum(len(text.encode()) for text in texts) / len(texts):.0f} bytes on average"
        )
        print("| method | texts per second and core | bytes sent per text | bytes received per text |")
        print("|---|---|---|---|")
        for name, method in METHODS.items():
            method(client, texts[:8])
            used, sent, received = server.cpu_s, wire.sent, wire.received
            method(client, texts)
            time.sleep(0.2)  # for the last bytes of the connection
            rate = len(texts) / (server.cpu_s - used)
            numbers = ((wire.sent - sent) / len(texts), (wire.received - received) / len(texts))
            print(f"| {name} | {rate:,.1f} | {numbers[0]:,.0f} | {numbers[1]:,.0f} |", flush=True)
            if name == "`embed`, float32":
                embedding_mib = server.peak_rss_mib
        print(
            f"memory: {idle_mib:.0f} MiB after the start, {embedding_mib:.0f} MiB at most while embedding, "
            f"{server.peak_rss_mib:.0f} MiB at most with all methods"
        )


if __name__ == "__main__":
    main()
