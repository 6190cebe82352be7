"""The configuration of a server: built once at the edge, validated here, passed down."""

import re
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from attnlens_server.listening.address import Address, TcpAddress, parse_address

Provider = Literal["auto", "cpu", "cuda"]
EngineName = Literal["onnxruntime", "openvino"]
"""The package that runs the graphs."""
GraphPrecision = Literal["fp32", "fp16", "int8"]
"""What a graph of a bundle is in."""
Precision = Literal["fp32", "fp16", "int8", "bf16"]
"""What embeddings are computed in. bf16 is a way to compute the graph in fp32."""


def graph_precision(precision: Precision) -> GraphPrecision:
    """Return what the graph is in that embeddings in `precision` are computed with."""
    return "fp32" if precision == "bf16" else precision


MIB = 1 << 20
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 50051
DEFAULT_DEVICE = "CPU"
REQUEST_OVERHEAD_BYTES = 1024  # of a text in a message, and of a request; a prompt of some length fits


_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)

# What the value of a field must be by its type. Integral and Real: numbers of numpy are numbers, too.
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a str"),
}


class ConfigError(ValueError):
    """An option has a value that it can't have. The message names the option, the value and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that can be set about a server. The defaults suit a laptop.

    Attributes:
        bundle: the bundle directory.
        address: where to listen, as clients type it: HOST:PORT, `unix:PATH` or `unix-abstract:NAME`. None:
            `host` and `port` say it.
        host: the address to listen on.
        port: the port to listen on; 0 picks a free one.
        socket_mode: the permissions of the file of `unix:PATH`, in octal digits. Whoever may write connects.
        engine: what runs the graphs: `onnxruntime`, or `openvino` on Intel's and AMD's processors.
        provider: of ONNX Runtime: `cpu`, `cuda`, or `auto`: CUDA where it works, else CPU.
        device: of OpenVINO: `CPU`, or a GPU of Intel's such as `GPU` or `GPU.1`, which is not tested.
        precision: `fp16` or `int8` computes embeddings with the bundle's graph in it, `bf16` those of the
            fp32 graph with OpenVINO, on a processor that has bf16; attention stays fp32.
        device_id: which GPU, for CUDA.
        threads: threads that compute; 0 means one a physical core that this process may use.
        lanes: batches that run side by side, the threads divided among them; a batch that is alone gets all
            threads, for which the weights are in memory twice, unless this is 1. 0 means one a thread on a
            CPU, and 1 on CUDA. On a CPU at most one a thread.
        max_batch_tokens: tokens of one batch, padding included; a longer text runs by itself. 0 means 256 on
            a CPU, 512 on a CPU with OpenVINO, and 8192 on a GPU.
        max_attention_bytes: attention weights (fp32, all layers) of all batches that run; each lane has its
            part of it, and a text that is larger than that runs by itself.
        explain: serve Explain and Compare. The graph of contributions is opened by the first request that
            needs it, once for each number of threads; until then it takes no memory.
        max_computed_tokens: Maximum compute cost of one request beyond running each text once: the tokens of
            all further runs, which leave-one-out and the matrices of pairs need, those of an input matrix
            twice, and reductions of attention, converted to tokens.
        max_concurrent_inputs: texts that wait or run at a time, over all requests, those for attention and
            those for embeddings each by themselves; beyond, requests are refused.
        max_inputs_per_request: texts in one request; where `max_concurrent_inputs` is less, that counts,
            except for streams.
        max_text_bytes: bytes of UTF-8 in one text.
        max_request_text_bytes: bytes of UTF-8 in all texts of one request; where `max_response_bytes` is
            less, that counts.
        max_response_bytes: size of one reply message.
        max_memory_bytes: memory of all calls: what they brought, replies that are being made, and those that
            are not read yet, which are in memory twice; where five times `max_response_bytes` is more, that
            counts.
        max_calls: calls at a time, those that wait for a slow consumer included; of those that still wait for
            the bytes of their request, twice as many.
        accept_compression: accept compressed requests. A small one may become a large one in memory before
            its size is checked.
        max_tokens: tokens of one text, at most the model's position embeddings; None: the bundle's.
        worker_threads: threads that tokenize and build replies.
        stall_timeout_s: how long a client may take to read a message; then its call is ended.
        start_timeout_s: how long opening and trying one session of a graph may take.
        drain_timeout_s: how long running requests may take after SIGTERM.
        tls_cert: PEM certificate chain; with `tls_key`, the server speaks TLS.
        tls_key: PEM private key.
        tls_client_ca: PEM roots; with it, clients must show a certificate (mutual TLS).
        viewer_port: the port of the viewer over HTTP, with the same TLS; 0 picks a free one. None: no viewer.
        viewer_host: the address that it listens on.
        viewer_origin: The viewer's public address, such as https://lens.example.org, if browsers reach it by
            a DNS name or through a reverse proxy. If None, only IP addresses, localhost and `viewer_host`
            are accepted.
        log_requests: write a line to the log for each request, at level info. Texts are never in it.
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
    max_concurrent_inputs: int = 2048
    max_inputs_per_request: int = 512
    max_text_bytes: int = MIB // 8
    max_request_text_bytes: int = 4 * MIB
    max_response_bytes: int = 32 * MIB
    max_memory_bytes: int = 512 * MIB
    max_calls: int = 4096
    accept_compression: bool = False
    max_tokens: int | None = None
    worker_threads: int = 2
    stall_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    viewer_port: int | None = None
    viewer_host: str = "127.0.0.1"
    viewer_origin: str | None = None
    log_requests: bool = False

    def __post_init__(self) -> None:
        """Check every field. Raises ConfigError for the first that is wrong."""
        self._check_kinds()
        if self.provider not in get_args(Provider):
            raise ConfigError(f"provider is {self.provider!r}: use one of {', '.join(get_args(Provider))}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision is {self.precision!r}: use one of {', '.join(get_args(Precision))}")
        if self.engine not in get_args(EngineName):
            raise ConfigError(f"engine is {self.engine!r}: use one of {', '.join(get_args(EngineName))}")
        self._check_engine()
        self._check_range("port", 0, 65535)
        self._check_address()
        self._check_range("device_id", 0, 1023)
        self._check_range("threads", 0, 1024)
        self._check_range("lanes", 0, 1024)
        self._check_range("max_batch_tokens", 0, 1 << 24)
        self._check_range("max_attention_bytes", MIB, 1 << 40)
        self._check_range("max_computed_tokens", 1, 1 << 40)
        self._check_range("max_concurrent_inputs", 1, 1 << 24)
        self._check_range("max_inputs_per_request", 1, 1 << 24)
        self._check_range("max_response_bytes", 1 << 16, (1 << 31) - 1)
        self._check_range("max_request_text_bytes", 1, (1 << 31) - 1)
        self._check_range("max_text_bytes", 1, self.max_request_text_bytes)
        self._check_range("max_memory_bytes", 1, 1 << 40)
        self._check_range("max_calls", 1, 1 << 24)
        self._check_range("worker_threads", 1, 256)
        self._check_range("stall_timeout_s", 0.001, 86_400)
        self._check_range("start_timeout_s", 0.001, 86_400)
        self._check_range("drain_timeout_s", 0, 86_400)
        if self.max_tokens is not None:
            self._check_range("max_tokens", 1, 1 << 24)
        if self.viewer_port is not None:
            self._check_range("viewer_port", 0, 65535)
        if self.viewer_origin is not None and not _ORIGIN.fullmatch(self.viewer_origin):
            raise ConfigError(
                f"viewer_origin is {self.viewer_origin!r}: give scheme and host as browsers show them, "
                "such as https://lens.example.org or http://lens.example.org:8080, without a path"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")

    @property
    def listens_at(self) -> Address:
        """Where the server listens."""
        return parse_address(self.address) if self.address is not None else TcpAddress(self.host, self.port)

    @property
    def inputs_limit(self) -> int:
        """The most texts that one request may have."""
        return min(self.max_inputs_per_request, self.max_concurrent_inputs)

    @property
    def request_text_limit(self) -> int:
        """The most bytes of text that one request may have."""
        return min(self.max_request_text_bytes, self.max_response_bytes)

    @property
    def request_limit(self) -> int:
        """The largest request message: all its text or ids, and what stands around each."""
        return self.request_text_limit + REQUEST_OVERHEAD_BYTES * (self.inputs_limit + 1)

    def _check_kinds(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = get_args(field.type) or (field.type,)
            kind, told = next((_KINDS[kind] for kind in allowed if kind in _KINDS), (object, ""))
            if value is None and type(None) in allowed:
                continue
            if not isinstance(value, kind) or (kind in (Integral, Real) and isinstance(value, bool)):
                or_none = " or None" if type(None) in allowed else ""
                raise ConfigError(f"{field.name} is {value!r}: give {told}{or_none}")

    def _check_engine(self) -> None:
        """Make sure that what was asked for is what this engine has."""
        if self.engine == "onnxruntime":
            if self.precision == "bf16":
                raise ConfigError(
                    "precision is bf16, which ONNX Runtime does not have on a CPU: use --engine openvino, "
                    "or --precision fp32"
                )
            if self.device != DEFAULT_DEVICE:
                raise ConfigError(
                    f"device is {self.device!r}, and it is for --engine openvino: with ONNX Runtime, use "
                    "--provider and --device-id"
                )
            return
        if self.precision == "fp16":
            raise ConfigError(
                "precision is fp16, which is for CUDA: with --engine openvino, use bf16, int8 or fp32"
            )
        if self.provider == "cuda":
            raise ConfigError(
                "provider is cuda, which OpenVINO does not have: use --engine onnxruntime, or leave it out"
            )
        if self.device_id:
            raise ConfigError(
                f"device_id is {self.device_id}, and it is for CUDA: with --engine openvino, use --device"
            )
        if not re.fullmatch(r"CPU|GPU(\.[0-9]{1,3})?", self.device):
            raise ConfigError(f"device is {self.device!r}: use CPU, GPU, or GPU.1 for the second GPU")

    def _check_address(self) -> None:
        try:
            address = self.listens_at
        except ValueError as error:
            raise ConfigError(f"address {error}") from error
        # Host and port mean nothing to a socket; an environment such as that of the image may have them.
        has_both = self.address is not None and (self.host, self.port) != (DEFAULT_HOST, DEFAULT_PORT)
        if has_both and isinstance(address, TcpAddress):
            raise ConfigError(
                f"address is {self.address!r}, and there is host or port as well: give address alone, or the "
                "other two"
            )
        if not re.fullmatch("[0-7]{3}", self.socket_mode):
            raise ConfigError(f"socket_mode is {self.socket_mode!r}: give three octal digits, such as 660")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}: it must be from {low} to {high}")
