"""Server process: open the bundle, listen, warm up, serve, drain."""

import asyncio
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE_NAME

from attnlens_server.access import METRICS_HOST, open_access, warn_if_exposed
from attnlens_server.access.files import WatchedFiles, watch
from attnlens_server.config import ServerConfig
from attnlens_server.core.process import State
from attnlens_server.descriptors import grpc_connections, reserve_descriptors
from attnlens_server.errors import StartupError
from attnlens_server.grpc_api.calls import remember_creators
from attnlens_server.grpc_api.health import HealthService
from attnlens_server.grpc_api.identity import Gate
from attnlens_server.grpc_api.methods import DESCRIPTOR, SERVICE_NAME, add_service, handlers
from attnlens_server.grpc_api.open_streams import MAX_REFLECTIONS, OpenStreams
from attnlens_server.grpc_api.reflection import add_reflection
from attnlens_server.listening import TcpAddress, UnixAddress, UnixSocket, find_bind_problem
from attnlens_server.listening.tls import ServerTls, TlsContent
from attnlens_server.observing.observer import open_tracer
from attnlens_server.oip.methods import DESCRIPTOR as INFERENCE_DESCRIPTOR
from attnlens_server.oip.methods import InferenceService
from attnlens_server.oip.methods import add_service as add_inference_service
from attnlens_server.opening import Opening
from attnlens_server.served_model import ServedModel

if TYPE_CHECKING:
    from attnlens_server.http_api.host import HttpHost

logger = logging.getLogger(__name__)

ATTENTIONS_NAME = f"{SERVICE_NAME}.attentions"
"""Health service name of the methods that need the attention graph."""
# Signals that drain the server: all catchable signals that would otherwise end the process.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")

MAX_STREAMS = 256
"""Maximum number of concurrent calls per connection. Clients queue further calls."""
OTHER_CALLS = 64
"""Maximum number of calls in addition to those that `max_calls` limits: health and reflection."""
MAX_IDLE_MS = 600_000  # connections without calls are closed; clients open them again
LAST_CALLS_S = 0.2
CONNECTION_GRACE_MS = 600_000  # for the running calls of a connection that has reached its age
_RELEASE_TIMEOUT_S = 1.0
_GC_THRESHOLD = 5000  # new objects before the next garbage collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Description of a server that is ready for requests.

    Attributes:
        address: Address for clients.
        model: Model name.
        execution_provider: Execution provider of ONNX Runtime, or `OpenVINO` with its device.
        precision: Precision of embeddings.
        max_tokens: Maximum number of tokens per text.
        threads: Number of compute threads.
        lanes: Number of concurrent batches.
        max_batch_tokens: Maximum number of tokens per batch, including padding.
        warm_up_s: Time to load and test the graphs in seconds.
        http_url: URL for HTTP clients and browsers. Empty if HTTP is disabled.
        metrics_url: URL of the metrics. Empty if they have no port of their own.
    """

    address: str
    model: str
    execution_provider: str
    precision: str
    max_tokens: int
    threads: int
    lanes: int
    max_batch_tokens: int
    warm_up_s: float
    http_url: str = ""
    metrics_url: str = ""


class Server:
    """A gRPC server for one bundle.

    Attributes:
        observer: Notified of each request.
        supervisor: Supervisor of the server.
        has_hanging_lane: Whether a graph hangs and could not be interrupted when the server stopped.
    """

    def __init__(self, config: ServerConfig, opening: Opening | None = None) -> None:
        """Open and verify the bundle, without listening.

        Args:
            config: Configuration.
            opening: Thread that opens the bundle. If None, this thread does.

        Raises:
            StartupError: The bundle is invalid.
            ConfigError: An option does not fit the bundle.
        """
        self._config = config
        self._tls = _tls(config)
        self._watched: list[WatchedFiles[Any]] = []
        if self._tls is not None:
            self._watched.append(WatchedFiles(self._tls.files, self._tls.load, self._tls.use))
        served = self._served = ServedModel(config, opening)
        self._bundle, self._model, self._max_tokens = served.bundle, served.model, served.max_tokens
        self._engine, self._service, self._calls = served.engine, served.service, served.calls
        self._inference = InferenceService(served.bundle, served.service, config)
        self.observer = served.observer
        self.observer.tracer = open_tracer(_method_names())
        self.supervisor = served.supervisor
        self.supervisor.on_change = self._update_health
        self.has_hanging_lane = False
        self._supervising: asyncio.Task[None] | None = None
        self._access = open_access(
            config, self._model.name, has_certificates=config.tls_client_ca is not None
        )
        self._watched += self._access.files
        self._gate = Gate(self._access)
        self._calls.identify = self._gate.identify
        self._streams = OpenStreams(max(1, config.max_calls // 2))
        self._health = HealthService([SERVICE_NAME, ATTENTIONS_NAME], self._streams, self._gate.check_health)
        self._releasing: asyncio.Task[None] | None = None
        self._http: HttpHost | None = None
        self._socket_file: UnixSocket | None = None

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Serve until one of STOP_SIGNALS is received, then drain.

        Raises:
            StartupError: The address cannot be bound, or a graph cannot be loaded.
        """
        with _stop_signals() as stop:
            grpc_server, address = await self._listen()
            watching = asyncio.create_task(self._watch_files())
            try:
                await self._listen_for_http()
                warm_up_s = await self._warm_up_unless(stop)
                if not stop.is_set():
                    await self._set_serving()
                    _announce(on_ready, self._ready(address, warm_up_s))
                await stop.wait()
            finally:
                watching.cancel()
                await self._shut_down(grpc_server)

    async def _watch_files(self) -> None:
        """Use changed keys, policies and certificates, and report a certificate that expires soon."""
        await watch(self._watched, self._tls.check_expiry if self._tls else lambda: None)

    def _ready(self, address: str, warm_up_s: float) -> Ready:
        engine = self._engine
        return Ready(
            address=address,
            model=self._model.name,
            execution_provider=engine.runs_on,
            precision=self._bundle.precision,
            max_tokens=self._max_tokens,
            threads=engine.num_threads,
            lanes=engine.num_lanes,
            max_batch_tokens=engine.max_batch_tokens,
            warm_up_s=warm_up_s,
            http_url=self._http.url if self._http else "",
            metrics_url=self._http.metrics_url if self._http else "",
        )

    async def _warm_up_unless(self, stop: asyncio.Event) -> float:
        """Warm up until `stop` is set. Return the duration in seconds, or 0 if it was stopped."""
        warming_up = asyncio.ensure_future(self._warm_up())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((warming_up, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not stop.is_set():
            return await warming_up
        self._engine.stop_opening()
        with suppress(StartupError):
            await warming_up
        return 0.0

    async def _listen(self) -> tuple[grpc.aio.Server, str]:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_error)
        reserve_descriptors(self._config)
        remember_creators(asyncio.get_running_loop())
        grpc_server = grpc.aio.server(
            options=_channel_options(self._config),
            # `Calls` and `OpenStreams` reject calls before with a reason, but not those that end at once.
            maximum_concurrent_rpcs=2 * self._config.max_calls + OTHER_CALLS,
        )
        max_texts = self._config.max_inputs_per_request
        add_service(grpc_server, handlers(self._served.methods, self._calls, max_texts))
        self._health.add_to(grpc_server)
        add_inference_service(
            grpc_server,
            self._inference,
            self._calls,
            max_texts,
            self._streams,
            self._gate.check_health,
        )
        if self._config.reflection or not self._access.is_on:
            add_reflection(
                grpc_server,
                [SERVICE_NAME, INFERENCE_DESCRIPTOR.full_name, HEALTH_SERVICE_NAME],
                OpenStreams(MAX_REFLECTIONS),
                INFERENCE_DESCRIPTOR.file.pool,
                check_access=self._gate.check,
            )
        warn_if_exposed(self._access, _hosts(self._config))
        address = self._bind(grpc_server)
        if self._config.tls_cert is None:
            self._calls.on_dropped = functools.partial(self._release_dropped_call, address)
        await grpc_server.start()
        logger.debug("listening on %s", address)
        return grpc_server, address

    def _release_dropped_call(self, address: str) -> None:
        """Call this server, so that grpc.aio releases the previous call and resets its stream."""

        async def call_nothing() -> None:
            options = [("grpc.enable_http_proxy", 0)]
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    "/attnlens/Nothing"
                )
                with suppress(grpc.aio.AioRpcError):  # there is no such method, but the call is accepted
                    await call(b"", timeout=_RELEASE_TIMEOUT_S)

        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.get_running_loop().create_task(call_nothing())

    def _bind(self, grpc_server: grpc.aio.Server) -> str:
        """Bind the configured address and return the address for clients."""
        config, address = self._config, self._config.listens_at
        credentials = None if self._tls is None else _credentials(self._tls)
        if not isinstance(address, UnixAddress):
            port = _add_port(grpc_server, str(address), credentials)
            if port is None:
                raise StartupError(f"cannot listen on {address}: {find_bind_problem(address)}")
            return str(TcpAddress(address.host, port) if isinstance(address, TcpAddress) else address)
        self._socket_file = UnixSocket(address, int(config.socket_mode, 8))
        self._socket_file.prepare()
        if _add_port(grpc_server, str(self._socket_file.bound), credentials) is None:
            raise StartupError(f"cannot listen on {address}: its file system does not support sockets")
        self._socket_file.publish()
        return str(address)

    async def _listen_for_http(self) -> None:
        config = self._config
        if config.http_port is None and config.metrics_port is None:
            return
        from attnlens_server.http_api.host import HttpHost  # noqa: PLC0415 - an optional dependency
        from attnlens_server.http_api.identity import AccessGate  # noqa: PLC0415

        self._http = HttpHost(
            self._service,
            self._served.methods,
            self._engine,
            self._bundle,
            config,
            self.observer,
            AccessGate(self._access),
        )
        self._http.metrics.add_pool(
            "attnlens_open_streams", "Open streams of health checks", self._streams.pool
        )
        lag = self.supervisor.lag
        self._http.metrics.add_lag(lag.BOUNDS_S, lag.counts, lambda: lag.sum_s)
        if (tls := self._tls) is not None:
            self._http.metrics.add_certificate(lambda: tls.expires_at)
        await self._http.listen(self._tls.context if self._tls else None)

    async def _warm_up(self) -> float:
        loop = asyncio.get_running_loop()
        seconds = await loop.run_in_executor(None, self._served.start)

        def update_health(_: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._update_health(), loop)

        self._engine.watch(functools.partial(loop.call_soon_threadsafe, self._fail), update_health)
        if self._bundle.precision == "fp16" and self._engine.runtime.is_on_cpu:
            logger.warning(
                "precision is fp16 on a CPU, where ONNX Runtime computes in fp32 with additional casts, "
                "which is less exact than the fp32 graph: use --precision fp32"
            )
        return seconds

    def _fail(self) -> None:
        """Set all health services to NOT_SERVING permanently, because the engine has failed."""
        self._service.process.state = State.FAILED
        self._failing = asyncio.ensure_future(self._health.shut_down())

    async def _set_serving(self) -> None:
        if self._service.process.state is not State.STARTING:
            return  # a lane has failed during the warm-up
        # Exclude permanent objects from garbage collection, which shortens a full collection from 100 ms to a
        # few. The start leaves less than a thousand objects of garbage, so they are not collected before.
        gc.freeze()
        # A call leaves five small objects (of gRPC). Looking for them after each 700 new objects, the default
        # of Python 3.11, takes 7 % of the event loop's time.
        gc.set_threshold(_GC_THRESHOLD)
        gc.enable()
        self._service.process.state = State.SERVING
        if hasattr(signal, "SIGBUS"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGBUS, self._end_after_bus_error)
        await self._update_health()
        self._supervising = asyncio.create_task(self.supervisor.run())
        logger.info("serving %s", self._model.name)

    def _end_after_bus_error(self) -> None:
        """Log why the process ends, and end it.

        A thread that runs a graph receives SIGBUS if weights that it has mapped were truncated. It repeats
        the access, and receives the signal, until the process ends. It does not hold Python's lock meanwhile.
        """
        logger.critical(
            "a file that is mapped into memory was truncated (SIGBUS), such as weights of %s that `cp` "
            "overwrites: the process ends. Restore the bundle and restart the server. To replace a bundle, "
            "write the new one to another path and rename it",
            self._config.bundle,
        )
        if self.observer.log is not None:
            self.observer.log.close()
        os._exit(1)

    async def _update_health(self) -> None:
        is_serving = self._service.process.is_serving
        await self._health.set_serving("", SERVICE_NAME, is_serving=is_serving)
        can_run_attention = is_serving and self._engine.can_run_attention
        await self._health.set_serving(ATTENTIONS_NAME, is_serving=can_run_attention)

    async def _shut_down(self, grpc_server: grpc.aio.Server) -> None:
        self._service.process.state = State.DRAINING
        if self._supervising is not None:
            self._supervising.cancel()
        await self._health.shut_down()
        logger.info("draining, at most %g s", self._config.drain_timeout_s)
        # New calls are rejected from here on. Once all calls of the encoder service have ended, gRPC's calls
        # that have not reached it have a moment to be rejected with a status, and endless streams, such as
        # those of reflection, are cut off.
        stopping = asyncio.ensure_future(grpc_server.stop(self._config.drain_timeout_s))
        if self._socket_file is not None:
            self._socket_file.remove()
        drained = asyncio.ensure_future(self._calls.wait_until_none())
        if self._http is not None:
            await self._http.stop(self._config.drain_timeout_s)
        await asyncio.wait((stopping, drained), return_when=asyncio.FIRST_COMPLETED)
        await grpc_server.stop(LAST_CALLS_S)
        await stopping
        drained.cancel()
        self.has_hanging_lane = not await asyncio.get_running_loop().run_in_executor(None, self._engine.close)
        self._service.process.workers.close()
        if self._http is not None:
            self._http.close()
        if self.observer.tracer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.observer.tracer.close)
        logger.info("stopped")


def _method_names() -> dict[str, str]:
    """Return the full names of all gRPC methods that `Calls` runs, by their names."""
    services = (DESCRIPTOR, INFERENCE_DESCRIPTOR)
    return {
        method.name: f"{service.full_name}/{method.name}"
        for service in services
        for method in service.methods
    }


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    # Reject compressed requests before they are decompressed: gRPC checks the size only afterwards.
    no_compression = [("grpc.compression_enabled_algorithms_bitset", 1)]
    age_s = config.max_connection_age_s
    connection_age = [
        ("grpc.max_connection_age_ms", int(1000 * (age_s or 0))),
        ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_MS),
    ]
    return [
        *([] if config.accept_compression else no_compression),
        *([] if age_s is None else connection_age),
        ("grpc.max_receive_message_length", config.request_limit),
        ("grpc.max_send_message_length", -1),  # response sizes are checked before the computation
        # Otherwise, gRPC accepts megabytes of a call before `Receiver` reads its message. A message that is
        # read is not slower: gRPC then accepts all of it at once.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),  # an address in use is an error
        ("grpc.keepalive_time_ms", 30_000),  # detects dead peers and frees their resources
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.server_handshake_timeout_ms", int(1000 * config.request_timeout_s)),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        # Answer each PING. Otherwise, gRPC closes the connection, but first allocates 4 KB for each PING that
        # it has already read: 0.6 GB a second if a client sends nothing else. This way, a flood of 30 s
        # allocated 0.7 GB until it ended.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_allowed_incoming_connections", grpc_connections(config)),
        # A stream that a client has reset counts until Python has released it. With this limit the C core
        # rejects further streams of the connection. Without it, thousands of them wait for the event loop.
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]


def _add_port(
    grpc_server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int | None:
    """Bind an address. Return the port, 1 for sockets without a port, or None on failure."""
    try:
        if credentials is None:
            return grpc_server.add_insecure_port(address)
        return grpc_server.add_secure_port(address, credentials)
    except RuntimeError:
        return None


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return credentials that use the current content of the TLS files for new connections."""

    def configuration(content: TlsContent) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(content.key, content.certificate)], root_certificates=content.client_ca
        )

    used = tls.content

    def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration if it has changed. gRPC calls this for each handshake, in its threads."""
        nonlocal used
        content = tls.content
        if content is used:
            return None
        used = content
        return configuration(content)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used),
        changed_configuration,  # type: ignore[arg-type]  # None is allowed: nothing has changed
        require_client_authentication=used.client_ca is not None,
    )


def _hosts(config: ServerConfig) -> dict[str, str]:
    """Return the hosts that clients connect to, by the option that sets them."""
    address = config.listens_at
    hosts = {}
    if isinstance(address, TcpAddress):
        hosts["--host" if config.address is None else "--address"] = address.host
    if config.http_port is not None:
        hosts["--http-host"] = config.http_host
    if config.metrics_port is not None:
        hosts[METRICS_HOST] = config.metrics_host
    return hosts


def _tls(config: ServerConfig) -> ServerTls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _announce(on_ready: Callable[[Ready], None], ready: Ready) -> None:
    """Call `on_ready`. An output error does not stop the server."""
    try:
        on_ready(ready)
    except (OSError, ValueError) as error:  # ValueError: the file is closed
        logger.warning("cannot write the ready line: %s", error)


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that STOP_SIGNALS set. SIGHUP remains ignored under nohup."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    handled = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    for number in handled:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def _is_server_error(record: logging.LogRecord) -> bool:
    """Filter out the tracebacks that gRPC logs for what clients do.

    They disconnect before their reply is sent, or call a method whose name is not UTF-8.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (grpc.aio.InternalError, UnicodeDecodeError))
