"""Shared helpers: requests as bytes, and checks of the server before and after an attack."""

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from bench.servers import RunningServer
from bench.studies.raw_http2 import RawClient, Reply
from served import ServerProcess

DEADLINE_S = 30.0
HELLO = pb.EmbedRequest(inputs=[pb.Input(text="hello")])

OK = grpc.StatusCode.OK.value[0]
CANCELLED = grpc.StatusCode.CANCELLED.value[0]
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
UNKNOWN = grpc.StatusCode.UNKNOWN.value[0]
ABORTED = grpc.StatusCode.ABORTED.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


class Target:
    """A server and its state before the attack."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.address = server.address
        self.process = RunningServer(server.address, server.process.pid)

    def remember(self) -> None:
        """Record the state that must not change."""
        self._vector = self.vector()
        self._log_size = len(self.server.log())
        self.process.forget_peak()
        self._rss_mib = self.process.rss_mib

    @property
    def new_log(self) -> str:
        """Log output since the call to `remember`."""
        return self.server.log()[self._log_size :]

    @property
    def peak_growth_mib(self) -> float:
        """Peak memory growth since the call to `remember`."""
        return self.process.peak_rss_mib - self._rss_mib

    def ask(self, path: str | bytes, message: bytes, timeout_s: float = DEADLINE_S) -> Reply:
        """Make one call over a new connection and read the complete response."""
        with RawClient(self.address) as client:
            reply = client.call(path, message)
            client.wait_for_ends([reply], timeout_s)
        return reply

    def vector(self) -> bytes:
        """Embed one text and return the vector's bytes."""
        with grpc.insecure_channel(self.address) as channel:
            return EncoderServiceStub(channel).Embed(HELLO, timeout=DEADLINE_S).embeddings.data

    def check_unharmed(self) -> None:
        """Check that the server still runs and returns the same vector, and that it logged no traceback."""
        assert self.server.process.poll() is None
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        assert np.isfinite(np.frombuffer(self._vector, "<f4")).all()
        assert self.vector() == self._vector
        assert "Traceback" not in self.new_log
