"""Cases for servers under load from the load generator."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attnlens.v1.manifest_pb2 import Architecture
from bench.cases.row import Case, Reference, Row, RowKey, Sample
from bench.flops import text_flops
from bench.lines import LineProcess
from bench.servers import RunningServer
from bench.workloads import Workload

CHECK_EVERY = 16  # one in this many requests is verified against the same request sent alone
ACCURACY_TEXTS = 100  # number of texts compared with the fp32 reference


class ServerCase(Case):
    """Closed-loop clients: each sends its next request after receiving a response."""

    def __init__(
        self,
        load: LineProcess,
        server: RunningServer,
        key: RowKey,
        workload: Workload,
        architecture: Architecture,
        reference: Reference,
        *,
        seconds: float,
        threads: int,
        protocol: str = "grpc",
        texts_per_request: int = 1,
        settle_s: float = 0.3,
    ) -> None:
        super().__init__(key)
        self._load, self.server, self._architecture = load, server, architecture
        self._seconds, self._settle_s, self._threads = seconds, settle_s, threads
        self._workload, self._reference = workload, reference
        self._responses: list[dict[str, Any]] = []
        self._key = f"{key} {texts_per_request}"
        self._request_options: dict[str, Any] = {
            "texts": workload.texts,
            "lengths": workload.lengths,
            "num_layers": architecture.num_layers,
            "texts_per_request": texts_per_request,
            "check_every": CHECK_EVERY if texts_per_request == 1 else len(workload.texts),
            "protocol": protocol,
            "what": key.what,
            "address": server.address,
        }
        self.details["texts_per_request"] = texts_per_request

    def prepare(self) -> None:
        self._load.request(do="prepare", key=self._key, **self._request_options)
        if self.key.what.startswith("embed"):
            num_texts = min(ACCURACY_TEXTS, len(self._workload.texts))
            requests = -(-num_texts // self._request_options["texts_per_request"])
            load = {"clients": self.key.clients, "requests": requests}
            response = self._load.request(do="vectors", key=self._key, **load)
            self.accuracy = self._reference.compare(response["vectors"], self._workload)
        self.measure_closed(seconds=0.3)

    def measure(self) -> Sample:
        sample, response = self.measure_closed(self._seconds)
        self._responses.append(response)
        return sample

    def measure_closed(self, seconds: float) -> tuple[Sample, dict[str, Any]]:
        """Measure for `seconds`, or for one pass over the workload if requests have several texts."""
        clients, texts_per_request = self.key.clients, self._request_options["texts_per_request"]
        if texts_per_request > 1:
            requests = -(-len(self._request_options["texts"]) // texts_per_request)
            return self._run(do="count", clients=clients, requests=requests)
        return self._run(do="closed", clients=clients, seconds=seconds, settle_s=self._settle_s)

    def row(self) -> Row:
        """Return the row, including the medians of the load generator's metrics."""
        return super().row() | (merge(self._responses) if self.samples else {})

    def measure_open(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send requests at a fixed rate and return the throughput and latencies."""
        sample, response = self._run(do="open", clients=64, rate=rate, seconds=seconds, seed=round(rate))
        fields = asdict(self.key) | {"clients": None, "rate": rate}
        return fields | {"texts_per_s": sample.texts / sample.seconds} | response

    def check_all(self) -> None:
        """Verify every response from now on."""
        self._load.request(do="prepare", key=self._key, **(self._request_options | {"check_every": 1}))

    def send(self, clients: int, requests: int) -> dict[str, Any]:
        """Send a fixed number of requests and return their metrics."""
        sample, response = self._run(do="count", clients=clients, requests=requests)
        return {"texts": sample.texts, "texts_per_s": sample.texts / sample.seconds} | response

    def _run(self, **request: object) -> tuple[Sample, dict[str, Any]]:
        server_cpu_s = self.server.cpu_s
        response = self._load.request(key=self._key, **request)
        cores_s = response.pop("wall_s") * self._threads
        response["client_cpu_share"] = response.pop("client_cpu_s") / cores_s
        response["server_cpu_share"] = (self.server.cpu_s - server_cpu_s) / cores_s
        counts = {int(length): count for length, count in response.pop("counts_by_length").items()}
        sample = Sample(
            response.pop("seconds"),
            response.pop("texts"),
            sum(length * count for length, count in counts.items()),
            sum(text_flops(self._architecture, length) * count for length, count in counts.items()),
        )
        return sample, response


def merge(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge load generator metrics: medians, total errors and the largest difference."""
    errors: Counter[str] = Counter()
    for response in responses:
        errors.update(response["errors"])
    latencies = [response["latency_ms"] for response in responses if response["latency_ms"]]
    return {
        "latency_ms": {
            name: statistics.median(latency[name] for latency in latencies) for name in latencies[0]
        }
        if latencies
        else {},
        "errors": dict(errors),
        "compared": sum(response["compared"] for response in responses),
        "max_abs_difference_from_alone": max(
            response["max_abs_difference_from_alone"] for response in responses
        ),
        "client_cpu_share": statistics.median(response["client_cpu_share"] for response in responses),
        "server_cpu_share": statistics.median(response["server_cpu_share"] for response in responses),
    }
