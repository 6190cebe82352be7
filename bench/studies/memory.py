"""Measures the memory of a server with `--max-memory-bytes` at full load.

`python -m bench.studies.memory BUNDLE [--seconds N] [--limits MIB...] [-- OPTIONS OF attnlens serve]`

Clients send the largest requests of all kinds, and some do not read their responses. Requires Linux.
"""

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import EXPLAIN_METHOD_CONTRIBUTIONS, EXPLAIN_METHOD_LEAVE_ONE_OUT
from bench.servers import attnlens_server

LOG = Path(tempfile.gettempdir()) / "attnlens-memory.log"
NUM_CLIENTS, NUM_STALLED = 24, 4
MIB = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]


class Load:
    """Clients of one server, until `stop`."""

    def __init__(self, address: str) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, args=(number,), daemon=True)
            for target, count in ((self._call, NUM_CLIENTS), (self._stall, NUM_STALLED))
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each client finish its call."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        random_ = random.Random(number)  # a reproducible load
        with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
            stub = EncoderServiceStub(channel)
            while not self._over.is_set():
                words = random_.choice((4, 40, 150, 250))
                text = pb.Input(text=" ".join(f"w{random_.randrange(10_000)}" for _ in range(words)))
                count = random_.choice((1, 8, 64))
                try:
                    self._send(stub, random_.randrange(4), [text] * count)
                    self.counts["OK"] += 1
                except grpc.RpcError as error:
                    self.counts[error.code().name] += 1
                    self._over.wait(0.05)

    def _send(self, stub: EncoderServiceStub, kind: int, texts: list[pb.Input]) -> None:
        attention = [pb.AttentionQuery()]
        match kind:
            case 0:
                stub.Embed(pb.EmbedRequest(inputs=texts, truncate=True))
            case 1:
                stub.Encode(pb.EncodeRequest(inputs=texts[:2], truncate=True, attention=attention))
            case 2:
                request = pb.EncodeStreamRequest(inputs=texts, truncate=True, attention=attention)
                stream = stub.EncodeStream(request)
                for _ in stream:
                    if self._over.is_set():
                        stream.cancel()
            case _:
                method = EXPLAIN_METHOD_LEAVE_ONE_OUT if len(texts) == 1 else EXPLAIN_METHOD_CONTRIBUTIONS
                stub.Explain(pb.ExplainRequest(inputs=texts, truncate=True, methods=[method]))

    def _stall(self, number: int) -> None:
        """Read the first message of large streams and then none."""
        del number
        request = pb.EncodeStreamRequest(
            inputs=[pb.Input(text="word " * 240)] * 64, truncate=True, attention=[pb.AttentionQuery()]
        )
        with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
            while not self._over.is_set():
                stream = EncoderServiceStub(channel).EncodeStream(request)
                try:
                    next(stream)
                    self._over.wait(10)
                except grpc.RpcError:
                    self._over.wait(0.5)
                stream.cancel()


def main() -> None:
    """Print the peak memory for each limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--limits", type=int, nargs="+", default=[1300, 2000], help="in MiB")
    parser.add_argument("options", nargs="*", help="options of attnlens serve, after --")
    args = parser.parse_args()
    print("| limit, MiB | peak, MiB | share | calls |\n|---|---|---|---|")
    for limit in args.limits:
        options = ("--max-memory-bytes", str(limit * MIB), *args.options)
        with attnlens_server(args.bundle, "fp32", 0, LOG, *options) as server:
            load = Load(server.address)
            time.sleep(args.seconds)
            peak = server.peak_rss_mib
            load.stop()
        calls = ", ".join(f"{count} {status}" for status, count in load.counts.most_common())
        print(f"| {limit} | {peak:.0f} | {peak / limit:.0%} | {calls} |", flush=True)


if __name__ == "__main__":
    main()
