"""Server configuration and its validation."""

import re
from dataclasses import dataclass, fields
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from attnlens.short_repr import short_repr
from attnlens_server.listening.address import Address, TcpAddress, parse_address, tcp_address

Provider = Literal["auto", "cpu", "cuda"]
EngineName = Literal["onnxruntime", "openvino"]
"""Package that runs the graphs."""
GraphPrecision = Literal["fp32", "fp16", "int8"]
"""Precision of a graph in a bundle."""
Precision = Literal["fp32", "fp16", "int8", "bf16"]
"""Precision of embeddings. bf16 is a way to execute the fp32 graph."""
AccessLogMode = Literal["off", "errors", "slow", "sampled", "all"]


def graph_precision(precision: Precision) -> GraphPrecision:
    """Return the precision of the graph that computes embeddings in `precision`."""
    return "fp32" if precision == "bf16" else precision


_HTTP_MODULES = ("h11", "msgspec", "orjson", "prometheus_client", "starlette", "uvicorn")
MIB = 1 << 20
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 50051
DEFAULT_DEVICE = "CPU"
DEFAULT_CALL_BYTES = 512 * MIB
REQUEST_OVERHEAD_BYTES = 1024  # per text and per request, including a prompt of moderate length


_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)

# Smallest and largest values.
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "device_id": (0, 1023),
    "threads": (0, 1024),
    "lanes": (0, 1024),
    "max_batch_tokens": (0, 1 << 24),
    "max_attention_bytes": (MIB, 1 << 40),
    "max_computed_tokens": (1, 1 << 40),
    "max_concurrent_inputs": (1, 1 << 24),
    "max_inputs_per_request": (1, 1 << 24),
    "max_response_bytes": (1 << 16, (1 << 31) - 1),
    "max_request_text_bytes": (1, (1 << 31) - 1),
    "max_call_memory_bytes": (1, 1 << 40),
    "max_memory_bytes": (MIB, 1 << 44),
    "max_calls": (1, 1 << 24),
    "worker_threads": (1, 256),
    "stall_timeout_s": (0.001, 86_400),
    "start_timeout_s": (0.001, 86_400),
    "drain_timeout_s": (0, 86_400),
    "max_connection_age_s": (0.001, 86_400),
    "stuck_timeout_s": (0.001, 86_400),
    "max_tokens": (1, 1 << 24),
    "http_port": (0, 65535),
    "metrics_port": (0, 65535),
    "max_connections": (1, 1 << 20),
    "request_timeout_s": (0.001, 86_400),
}

# Allowed values by the type of a field. Integral and Real include NumPy scalars.
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a str"),
}


_ACCESS_LOG_VALUES: dict[AccessLogMode, float] = {"slow": 1.0, "sampled": 0.01}


@dataclass(frozen=True, slots=True)
class AccessLogSelection:
    """Which requests are logged.

    Attributes:
        mode: `off`; `errors`; `slow` and `sampled`, which include errors; or `all`.
        value: Minimum duration of a slow request in seconds, or share of sampled requests.
    """

    mode: AccessLogMode
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "AccessLogSelection":
        """Return the selection for a mode, which may be followed by `:` and its value.

        Raises:
            ValueError: The text is invalid.
        """
        name, _, value = text.partition(":")
        mode = next((mode for mode in get_args(AccessLogMode) if mode == name), None)
        if mode is None or (value and mode not in _ACCESS_LOG_VALUES):
            raise ValueError(text)
        number = float(value) if value else _ACCESS_LOG_VALUES.get(mode, 0.0)
        if not 0 <= number <= (1 if mode == "sampled" else 86_400):  # also for NaN
            raise ValueError(text)
        return cls(mode, number)


class ConfigError(ValueError):
    """An option has an invalid value. The message states the option, the value and the limit."""


@short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Server configuration. The defaults suit a laptop.

    Attributes:
        bundle: Bundle directory.
        address: Address to listen on: HOST:PORT, `unix:PATH` or `unix-abstract:NAME`. None uses `host` and
            `port`.
        host: Host to listen on.
        port: Port to listen on. 0 selects a free one.
        socket_mode: Permissions of the file of `unix:PATH` in octal. Users with write permission can connect.
        engine: `onnxruntime`, or `openvino` on processors by Intel and AMD.
        provider: Execution provider of ONNX Runtime: `cpu`, `cuda`, or `auto` for CUDA if it works, else CPU.
        device: Device of OpenVINO: `CPU`, or an Intel GPU such as `GPU` or `GPU.1`, which is untested.
        precision: Precision of embeddings. `fp16` and `int8` use the bundle's graph in that precision. `bf16`
            runs the fp32 graph with OpenVINO on processors with bf16. Attention is always fp32.
        device_id: GPU index for CUDA.
        threads: Number of compute threads. 0 means one per physical core that this process may use.
        lanes: Number of concurrent batches, which share the threads. Except for 1, a batch that runs alone
            uses all threads, unless it is short and was slower with them. This needs a second copy of the
            weights. 0 means one per thread on a CPU, and 1 on CUDA. On a CPU, at most one per thread.
        max_batch_tokens: Number of tokens per batch, including padding. Longer texts run alone. 0 means 256
            on a CPU, 512 on a CPU with OpenVINO, and 8192 on a GPU.
        max_attention_bytes: Size of the attention weights (fp32, all layers) of all running batches. Lanes
            share it equally. Texts that exceed a lane's share run alone.
        explain: Whether to serve Explain and Compare. The contributions graph is loaded by the first request
            that needs it, once for each number of threads.
        max_computed_tokens: Computation of one request beyond one run per text, in tokens: all further runs
            for leave-one-out and pair matrices (those of an input matrix count twice), and reductions of
            attention.
        max_concurrent_inputs: Number of waiting and running texts of all requests, separately for attention
            and embeddings. Further requests are rejected.
        max_inputs_per_request: Number of texts per request. Except for streams, also limited by
            `max_concurrent_inputs`.
        max_text_bytes: Size of a text in UTF-8.
        max_request_text_bytes: Size of all texts of a request in UTF-8. Also limited by `max_response_bytes`.
        max_response_bytes: Size of a response message.
        max_call_memory_bytes: Memory of all calls: requests, responses in progress, and unread responses,
            which are in memory twice. At least five times `max_response_bytes`. None means 512 MiB, or what
            `max_memory_bytes` leaves.
        max_memory_bytes: Memory of the process: graphs, batches and calls. The memory of graphs and batches
            is estimated at the start, and calls get the rest. None means no limit.
        max_calls: Number of concurrent calls, including those of slow consumers. Twice as many may be sending
            their requests.
        accept_compression: Whether to accept compressed requests. Small compressed requests may use much
            memory before their size is checked.
        max_tokens: Number of tokens per text, at most the number of position embeddings. None uses the
            bundle's limit.
        auto_truncate: Whether all APIs truncate long texts if a request does not specify it. Otherwise,
            OpenAI's API, gRPC and the routes of attnlens reject them.
        worker_threads: Number of threads for tokenization and responses.
        stall_timeout_s: Time in seconds that a client may take to read a message before its call is ended.
        start_timeout_s: Maximum time in seconds to load and test one graph.
        drain_timeout_s: Maximum time in seconds for running requests after SIGTERM.
        max_connection_age_s: Time in seconds after which a gRPC connection takes no new calls, so that its
            client connects again and finds new servers. Running calls have another 10 minutes. None means no
            limit.
        stuck_timeout_s: Maximum time in seconds that a batch may run before health checks fail. They also
            fail if requests are refused as overloaded while no batch ends, for this time and at most 30 s.
        tls_cert: Certificate chain in PEM format. With `tls_key`, it enables TLS.
        tls_key: Private key in PEM format.
        tls_client_ca: Root certificates in PEM format. If set, clients must present a certificate (mutual
            TLS).
        api_keys: File with the API keys of clients, one line `NAME sha256:HEX` each. If set, clients need a
            key or, with `tls_client_ca`, a certificate.
        policy: TOML file with the methods, rates and queue share of each client.
        reflection: Whether to serve gRPC reflection if clients are identified by `api_keys` or
            `tls_client_ca`. Otherwise it is always served.
        http_port: Port for HTTP (the APIs of OpenAI and others, the viewer, health checks), with the same TLS
            settings. 0 selects a free port. None disables HTTP.
        http_host: Host to listen on for HTTP.
        http_origin: Public address of the HTTP port, such as https://lens.example.org, if browsers reach it
            by a DNS name or through a reverse proxy. If None, the viewer accepts only IP addresses,
            localhost and `http_host` as host names.
        cors_origins: Origins of other web pages that may call the HTTP APIs, separated by commas, or `*`.
        http_token_ids: Whether OpenAI's API accepts token ids. Only for clients that use this model's
            tokenizer.
        metrics_port: Port for health checks and Prometheus metrics, without TLS and without access control.
            It is served by a thread of its own. 0 selects a free port. None leaves them on the HTTP port
            only.
        metrics_host: Host to listen on for `metrics_port`.
        max_connections: Number of HTTP connections, including those before their TLS handshake. If there are
            more, idle ones are closed first.
        request_timeout_s: Maximum time in seconds to receive the head of an HTTP request, to receive its
            body, and for the handshake of a gRPC connection.
        access_log: Which requests are logged after they end: `off`, `errors`, `slow` (at least 1 s, or
            as in `slow:0.5`), `sampled` (one in a hundred, or as in `sampled:0.1`) or `all`. `slow` and
            `sampled` include errors. Texts are never logged.
    """

    bundle: Path
    address: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    socket_mode: str = "660"
    engine: EngineName = "onnxruntime"
    provider: Provider = "auto"
    device: str = DEFAULT_DEVICE
    precision: Precision = "fp32"
    device_id: int = 0
    threads: int = 0
    lanes: int = 0
    max_batch_tokens: int = 0
    max_attention_bytes: int = 256 * MIB
    explain: bool = True
    max_computed_tokens: int = 1 << 18
    max_concurrent_inputs: int = 4096
    max_inputs_per_request: int = 2048
    max_text_bytes: int = MIB // 8
    max_request_text_bytes: int = 4 * MIB
    max_response_bytes: int = 32 * MIB
    max_call_memory_bytes: int | None = None
    max_memory_bytes: int | None = None
    max_calls: int = 4096
    accept_compression: bool = False
    max_tokens: int | None = None
    auto_truncate: bool = False
    worker_threads: int = 2
    stall_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    max_connection_age_s: float | None = None
    stuck_timeout_s: float = 300.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    api_keys: Path | None = None
    policy: Path | None = None
    reflection: bool = False
    http_port: int | None = None
    http_host: str = "127.0.0.1"
    http_origin: str | None = None
    cors_origins: str = ""
    http_token_ids: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    max_connections: int = 512
    request_timeout_s: float = 30.0
    access_log: str = "off"

    def __post_init__(self) -> None:
        """Validate all fields. Raises ConfigError for the first invalid one."""
        self._check_kinds()
        if self.provider not in get_args(Provider):
            raise ConfigError(f"provider is {self.provider!r}: use one of {', '.join(get_args(Provider))}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision is {self.precision!r}: use one of {', '.join(get_args(Precision))}")
        if self.engine not in get_args(EngineName):
            raise ConfigError(f"engine is {self.engine!r}: use one of {', '.join(get_args(EngineName))}")
        self._check_engine()
        self._check_http_modules()
        self._check_address()
        self._check_access_log()
        for name, (low, high) in _RANGES.items():
            if getattr(self, name) is not None:
                self._check_range(name, low, high)
        self._check_range("max_text_bytes", 1, self.max_request_text_bytes)
        for name, origins in (("http_origin", [self.http_origin]), ("cors_origins", self.allowed_origins)):
            for origin in origins:
                self._check_origin(name, origin)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("only one of tls_cert and tls_key is set: set both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca is set without tls_cert and tls_key: set them as well")

    @property
    def listens_at(self) -> Address:
        """Address to listen on."""
        return tcp_address(self.host, self.port) if self.address is None else parse_address(self.address)

    @property
    def http_address(self) -> TcpAddress | None:
        """Address of the HTTP port, or None without one."""
        return None if self.http_port is None else tcp_address(self.http_host, self.http_port)

    @property
    def metrics_address(self) -> TcpAddress | None:
        """Address of the port for health checks and metrics, or None without one."""
        return None if self.metrics_port is None else tcp_address(self.metrics_host, self.metrics_port)

    @property
    def access_log_selection(self) -> AccessLogSelection:
        """Which requests are logged."""
        return AccessLogSelection.parse(self.access_log)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins of other web pages that may call the HTTP APIs."""
        return tuple(origin.strip() for origin in self.cors_origins.split(",") if origin.strip())

    @property
    def inputs_limit(self) -> int:
        """Maximum number of texts per request."""
        return min(self.max_inputs_per_request, self.max_concurrent_inputs)

    @property
    def request_text_limit(self) -> int:
        """Maximum size of all texts of a request in bytes."""
        return min(self.max_request_text_bytes, self.max_response_bytes)

    @property
    def call_memory_limit(self) -> int:
        """Maximum memory of all calls in bytes, before `max_memory_bytes` limits it further."""
        if self.max_call_memory_bytes is not None:
            return self.max_call_memory_bytes
        return DEFAULT_CALL_BYTES if self.max_memory_bytes is None else self.max_memory_bytes

    @property
    def request_limit(self) -> int:
        """Maximum size of a request message in bytes, including overhead."""
        return self.request_text_limit + REQUEST_OVERHEAD_BYTES * (self.inputs_limit + 1)

    def _check_kinds(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = get_args(field.type) or (field.type,)
            kind, noun = next((_KINDS[kind] for kind in allowed if kind in _KINDS), (object, ""))
            if value is None and type(None) in allowed:
                continue
            if not isinstance(value, kind) or (kind in (Integral, Real) and isinstance(value, bool)):
                or_none = " or None" if type(None) in allowed else ""
                raise ConfigError(f"{field.name} is {value!r}: use {noun}{or_none}")

    def _check_engine(self) -> None:
        """Check that the engine supports the other options."""
        if self.engine == "onnxruntime":
            if self.precision == "bf16":
                raise ConfigError(
                    "precision is bf16, which ONNX Runtime does not support on CPUs: use --engine openvino, "
                    "or --precision fp32"
                )
            if self.device != DEFAULT_DEVICE:
                raise ConfigError(
                    f"device is {self.device!r}, but only --engine openvino supports it: with ONNX Runtime, "
                    "use --provider and --device-id"
                )
            return
        if self.precision == "fp16":
            raise ConfigError(
                "precision is fp16, which requires CUDA: with --engine openvino, use bf16, int8 or fp32"
            )
        if self.provider == "cuda":
            raise ConfigError(
                "provider is cuda, which OpenVINO does not support: use --engine onnxruntime, or omit it"
            )
        if self.device_id:
            raise ConfigError(
                f"device_id is {self.device_id}, which requires CUDA: with --engine openvino, use --device"
            )
        if not re.fullmatch(r"CPU|GPU(\.[0-9]{1,3})?", self.device):
            raise ConfigError(f"device is {self.device!r}: use CPU, GPU, or GPU.1 for the second GPU")

    def _check_http_modules(self) -> None:
        """Check that the modules of HTTP are installed, before a bundle is opened or exported."""
        if self.http_port is None and self.metrics_port is None:
            return
        missing = next((name for name in _HTTP_MODULES if find_spec(name) is None), None)
        if missing is not None:
            raise ConfigError(
                f"HTTP needs {missing}, which is not installed: install attnlens[http], or omit --http-port "
                "and --metrics-port"
            )

    def _check_access_log(self) -> None:
        try:
            AccessLogSelection.parse(self.access_log)
        except ValueError as error:
            raise ConfigError(
                f"access_log is {self.access_log!r}: use off, errors, slow, slow:SECONDS, sampled, "
                "sampled:SHARE (0 to 1), or all"
            ) from error

    def _check_address(self) -> None:
        for name in ("host", "http_host", "metrics_host"):
            try:
                tcp_address(getattr(self, name), 0)
            except ValueError as error:
                raise ConfigError(f"{name} {error}") from error
        try:
            address = self.listens_at
        except ValueError as error:
            raise ConfigError(f"address {error}") from error
        # Sockets ignore host and port, which the environment of the image may set.
        has_both = self.address is not None and (self.host, self.port) != (DEFAULT_HOST, DEFAULT_PORT)
        if has_both and isinstance(address, TcpAddress):
            raise ConfigError(
                f"address is {self.address!r}, but host or port is also set: use only one of them"
            )
        if not re.fullmatch("[0-7]{3}", self.socket_mode):
            raise ConfigError(f"socket_mode is {self.socket_mode!r}: use three octal digits, such as 660")

    def _check_origin(self, name: str, origin: str | None) -> None:
        if origin is None or (name == "cors_origins" and origin == "*") or _ORIGIN.fullmatch(origin):
            return
        raise ConfigError(
            f"{name} is {origin!r}: use scheme and host as shown by browsers, such as "
            "https://lens.example.org or http://lens.example.org:8080, without a path"
        )

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}: use {low} to {high}")
