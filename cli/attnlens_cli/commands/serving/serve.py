"""`attnlens serve`: serve a bundle or a checkpoint over gRPC and HTTP."""

import dataclasses
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from attnlens_cli import how_to_install
from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, PROVIDERS, ConfigFailure, config_option
from attnlens_cli.commands.options import cache_option, source_argument
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.printable import counted, printable
from attnlens_server.config import ConfigError, EngineName, ServerConfig, graph_precision

if TYPE_CHECKING:
    from attnlens_server.server import Ready

EPILOG = """\b
Example:
  attnlens serve bundles/minilm --port 50051 --provider auto
  attnlens serve bundles/minilm --http-port 8080 --max-tokens 128
  attnlens serve sentence-transformers/all-MiniLM-L6-v2"""

_listen = partial(config_option, section="Listen address")
_compute = partial(config_option, section="Compute")
_explain = partial(config_option, section="Explanations")
_limit = partial(config_option, section="Limits")
_time = partial(config_option, section="Time limits")
_tls = partial(config_option, section="TLS")
_access = partial(config_option, section="Access control")
_log = partial(config_option, section="Logs")
_http = partial(config_option, section="HTTP")


@click.command(cls=Command, epilog=EPILOG)
@source_argument
@cache_option
@_listen("host", "Address to listen on.")
@_listen("port", "Port to listen on; 0 picks a free one.")
@_listen(
    "address",
    "Address instead of --host and --port: unix:PATH, unix-abstract:NAME or HOST:PORT, as in --address of "
    "client commands.",
)
@_listen("socket_mode", "Permissions of the socket file of unix:PATH. Connecting requires write permission.")
@in_section("Compute")(
    "--auto",
    is_flag=True,
    help="Use the fastest engine for --precision and the settings that `attnlens bench` measured for this "
    "bundle on this machine. Options that you set take precedence.",
)
@_compute(
    "engine",
    "Engine that runs the model. OpenVINO supports bf16 on suitable processors. Its embeddings differ from "
    "those of ONNX Runtime in the last digits, in bf16 by more.",
    ENGINES,
)
@_compute(
    "provider",
    "Device of ONNX Runtime. With cuda, the server refuses to start if CUDA cannot run the model.",
    PROVIDERS,
)
@_compute("device", "Device of OpenVINO: CPU, or an Intel GPU: GPU, GPU.1 for the second. GPUs are untested.")
@_compute(
    "precision",
    "Precision of embeddings: fp16 (for CUDA) or int8 (for CPUs) if the bundle has it, or bf16 with --engine "
    "openvino.",
    PRECISIONS,
)
@_compute("device_id", "Index of the GPU, for CUDA.")
@_compute("threads", "Number of compute threads; 0: one per physical core.")
@_compute(
    "lanes",
    "Number of batches that run concurrently; 0: one per thread on a CPU, 1 on CUDA. With 1, the weights are "
    "in memory once instead of twice.",
)
@_compute(
    "max_batch_tokens",
    "Maximum tokens of a batch, including padding; 0: 256 on a CPU, 512 with OpenVINO, 8192 on CUDA.",
)
@_compute("max_attention_bytes", "Maximum memory for the attention weights of running batches, in bytes.")
@_explain("explain", "Serve Explain and Compare. The first request opens their graph.")
@_limit(
    "max_computed_tokens",
    "Maximum compute cost of a request for leave-one-out, pair matrices and attention reductions, in tokens.",
)
@_limit(
    "max_concurrent_inputs", "Maximum number of waiting and running texts. Further requests are rejected."
)
@_limit("max_inputs_per_request", "Maximum number of texts in a request.")
@_limit("max_text_bytes", "Maximum size of a text in bytes.")
@_limit("max_request_text_bytes", "Maximum size of all texts of a request in bytes.")
@_limit("max_response_bytes", "Maximum size of a response in bytes.")
@_limit(
    "max_call_memory_bytes",
    "Maximum memory of all calls, including unread responses, in bytes.  [default: 512 MiB, or the rest of "
    "--max-memory-bytes]",
    int,
)
@_limit(
    "max_memory_bytes",
    "Maximum memory of the process in bytes: graphs, batches and calls.  [default: no limit]",
    int,
)
@_limit("max_calls", "Maximum number of concurrent calls.")
@_limit("accept_compression", "Accept compressed requests, which may be much larger after decompression.")
@_limit("max_tokens", "Maximum tokens of a text.  [default: the bundle's maximum]", int)
@_limit(
    "auto_truncate",
    "Truncate texts that exceed the maximum unless a request specifies otherwise, also in OpenAI's API and "
    "over gRPC.",
)
@_compute("worker_threads", "Number of threads for tokenization and responses.")
@_time("stall_timeout_s", "Maximum time for a client to read a message before its call is aborted.")
@_time("start_timeout_s", "Maximum time to open and test a graph, for each number of threads.")
@_time("drain_timeout_s", "Maximum time for running requests after SIGTERM.")
@_time(
    "max_connection_age_s",
    "Time after which a gRPC connection takes no new calls, so that its client connects again and finds new "
    "servers.  [default: no limit]",
    float,
)
@_time("stuck_timeout_s", "Maximum time that a batch may run before health checks fail.")
@_tls("tls_cert", "Certificate chain (PEM).", click.Path(path_type=Path))
@_tls("tls_key", "Private key (PEM).", click.Path(path_type=Path))
@_tls(
    "tls_client_ca",
    "Root certificates (PEM) of clients, which then need a certificate.",
    click.Path(path_type=Path),
)
@_access(
    "api_keys",
    "File with API keys of clients, as printed by `attnlens key`. Clients then need a key or a client "
    "certificate. Changes apply without a restart.",
    click.Path(path_type=Path),
)
@_access(
    "policy",
    "TOML file with the methods, rates and queue share of each client. Changes apply without a restart.",
    click.Path(path_type=Path),
)
@_access("reflection", "Serve gRPC reflection also with --api-keys or --tls-client-ca.")
@_http(
    "http_port",
    "Port for HTTP: the APIs of OpenAI and others, the viewer (a web page for exploring texts), health "
    "checks; 0 picks a free one.  [default: no HTTP]",
    int,
)
@_http("http_host", "Listen address for HTTP.")
@_http(
    "http_origin",
    "Public address of the HTTP port, such as https://lens.example.org, if browsers use a DNS name or a "
    "reverse proxy.",
)
@_http("cors_origins", "Origins of other web pages that may call the HTTP APIs, separated by commas, or *.")
@_http(
    "http_token_ids", "Accept token ids in OpenAI's API. Only for clients that use this model's tokenizer."
)
@_http(
    "metrics_port",
    "Port for health checks and Prometheus metrics alone, without TLS and access control; 0 picks a free "
    "one.  [default: only the HTTP port has them]",
    int,
)
@_http("metrics_host", "Listen address for --metrics-port.")
@_http(
    "max_connections", "Maximum number of HTTP connections. If there are more, idle ones are closed first."
)
@_http("request_timeout_s", "Maximum time to receive the head of an HTTP request, and to receive its body.")
@_log(
    "access_log",
    "Requests to log: off, errors, slow (at least 1 s, or as in slow:0.5), sampled (1 %, or as in "
    "sampled:0.1), or all. slow and sampled include errors. Never logs texts.",
)
def serve(
    source: Path,
    cache_dir: Path | None,
    auto: bool,
    **options: Any,  # noqa: ANN401 - fields of ServerConfig
) -> None:
    """Serve SOURCE over gRPC, and with --http-port over HTTP, until SIGTERM.

    SOURCE is a bundle or a checkpoint: a directory, or a hub id such as org/name or org/name@revision. A
    checkpoint is exported in --precision into the cache, and later starts use the cached bundle. `attnlens
    list` shows the cache.

    Prints one line when ready. Bundles that were altered or failed parity are rejected.
    """
    # gRPC's lines on stderr have a different format, and clients can cause any number of them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if auto and options["precision"] == "bf16" and not _is_given("engine"):
        options["engine"] = "openvino"  # the only engine with bf16
    _require_modules(options.get("engine", "onnxruntime"))
    from attnlens_cli.sources.source import resolve  # noqa: PLC0415 - heavy
    from attnlens_server.errors import StartupError  # noqa: PLC0415 - heavy

    _check_address_alone()
    try:
        config = ServerConfig(bundle=source, **options)
        bundle = resolve(source, cache_dir, graph_precision(config.precision))
        config = dataclasses.replace(config, bundle=bundle)
        if auto:
            config = dataclasses.replace(config, **_measured_options(config, cache_dir))
        from attnlens_server.process import serve as serve_bundle  # noqa: PLC0415 - heavy

        serve_bundle(config, _print_ready)
    except ConfigError as error:
        raise ConfigFailure(error) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def _measured_options(config: ServerConfig, cache_dir: Path | None) -> dict[str, Any]:
    """Return and print the options that were measured, without those that the user set.

    Raises:
        click.ClickException: Nothing was measured.
    """
    from attnlens_cli.sources.cache import default_directory  # noqa: PLC0415 - heavy
    from attnlens_cli.sources.measured import choose_options  # noqa: PLC0415 - heavy

    has_engine = config.precision == "bf16" or any(map(_is_given, ("engine", "provider", "device")))
    engines = [config.engine] if has_engine else get_args(EngineName)
    measured = choose_options(config, cache_dir or default_directory(), engines)
    options = {name: value for name, value in measured.items() if not _is_given(name)}
    used = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    click.echo(f"--auto: {used or 'you set all measured options'}", err=True)
    return options


def _is_given(name: str) -> bool:
    """Return whether the user set an option, on the command line, in a file or in the environment."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _require_modules(engine: EngineName) -> None:
    """Check that the modules of the server are installed. Importing them before an export takes longer."""
    modules = ["grpc_health", "grpc_reflection", "loky", "safetensors", "tokenizers"]
    if engine == "onnxruntime":
        modules.insert(0, engine)
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise click.UsageError(f"{missing[0]} is not installed: {how_to_install('server')}")
    if engine == "openvino" and find_spec(engine) is None:
        raise click.UsageError(f"openvino is not installed: {how_to_install('openvino')}")


def _check_address_alone() -> None:
    """Reject --host and --port in addition to --address. Their variables, as set in an image, are ignored."""
    ctx = click.get_current_context()
    given = [
        f"--{name}"
        for name in ("address", "host", "port")
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given[:1] == ["--address"] and len(given) > 1:
        raise click.UsageError(
            f"--address and {given[1]} are both given: use --address alone, or --host and --port"
        )


def _print_ready(ready: "Ready") -> None:
    parts = (
        f"model {printable(ready.model)}",
        ready.execution_provider,
        ready.precision,
        f"texts up to {counted(ready.max_tokens, 'token')}",
        counted(ready.threads, "thread"),
        counted(ready.lanes, "lane"),
        f"batches of {counted(ready.max_batch_tokens, 'token')}",
        f"warm-up {ready.warm_up_s:.2f} s",
    )
    click.echo(f"attnlens is ready at {ready.address}: {', '.join(parts)}")
    if ready.http_url:
        click.echo(f"HTTP and the viewer are at {ready.http_url}")
    if ready.metrics_url:
        click.echo(f"Metrics are at {ready.metrics_url}")
