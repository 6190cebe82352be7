"""`attnlens serve SOURCE`."""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, PROVIDERS, ConfigFailure, config_option
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.show.printable import counted, printable
from attnlens_cli.sources.options import cache_option, source_argument
from attnlens_server.config import ConfigError, ServerConfig, graph_precision

if TYPE_CHECKING:
    from attnlens_server.server import Ready

EPILOG = """\b
Example:
  attnlens serve bundles/minilm --port 50051 --provider auto
  attnlens serve bundles/minilm --viewer-port 8080 --max-tokens 128
  attnlens serve sentence-transformers/all-MiniLM-L6-v2"""

_listen = partial(config_option, section="Listening")
_compute = partial(config_option, section="Computing")
_explain = partial(config_option, section="Explanations")
_limit = partial(config_option, section="Limits")
_time = partial(config_option, section="Time limits")
_tls = partial(config_option, section="TLS")
_log = partial(config_option, section="Logs")
_viewer = partial(config_option, section="Viewer")


@click.command(cls=SectionCommand, epilog=EPILOG)
@source_argument
@cache_option
@_listen("host", "Address to listen on.")
@_listen("port", "Port to listen on; 0 picks a free one.")
@_listen(
    "address",
    "Where to listen, in place of --host and --port: unix:PATH, unix-abstract:NAME or HOST:PORT, the same as "
    "--address of the commands that ask a server.",
)
@_listen("socket_mode", "Permissions of the socket file of unix:PATH; who may write may connect.")
@_compute(
    "engine",
    "What runs the model. OpenVINO has bf16, on processors that have it; its vectors differ from those of "
    "ONNX Runtime in the last digits, in bf16 by more.",
    ENGINES,
)
@_compute(
    "provider",
    "Where ONNX Runtime runs. With cuda, the server refuses to start unless CUDA runs the model.",
    PROVIDERS,
)
@_compute(
    "device", "Where OpenVINO runs: CPU, or a GPU of Intel's: GPU, GPU.1 for the second. GPUs are not tested."
)
@_compute(
    "precision",
    "What embeddings are computed in: fp16 (for CUDA) or int8 (for a CPU) if the bundle has it, bf16 with "
    "--engine openvino.",
    PRECISIONS,
)
@_compute("device_id", "Which GPU, for CUDA.")
@_compute("threads", "Threads that compute; 0: one a physical core.")
@_compute(
    "lanes",
    "Batches that run side by side; 0: one a thread on a CPU, 1 on CUDA. With 1, the weights are in memory "
    "once instead of twice.",
)
@_compute(
    "max_batch_tokens",
    "Tokens of one batch, padding included; 0: 256 on a CPU, 512 with OpenVINO, 8192 on CUDA.",
)
@_compute("max_attention_bytes", "Attention weights of the batches that run, in bytes.")
@_explain("explain", "Serve Explain and Compare; their graph is opened by the first request.")
@_limit(
    "max_computed_tokens",
    "Maximum compute cost of a request for leave-one-out, matrices of pairs and reductions of attention, "
    "in tokens.",
)
@_limit("max_concurrent_inputs", "Texts that wait or run at a time; beyond, requests are refused.")
@_limit("max_inputs_per_request", "Texts in one request.")
@_limit("max_text_bytes", "Bytes of one text.")
@_limit("max_request_text_bytes", "Bytes of all texts of a request.")
@_limit("max_response_bytes", "Bytes of one reply.")
@_limit("max_memory_bytes", "Memory of all calls and of replies that are not read yet, in bytes.")
@_limit("max_calls", "Calls at a time.")
@_limit("accept_compression", "Accept compressed requests, which may be far larger than they look.")
@_limit("max_tokens", "Tokens of one text.  [default: the bundle's]", int)
@_compute("worker_threads", "Threads that tokenize and build replies.")
@_time("stall_timeout_s", "How long a client may take to read a message; then its call is ended.")
@_time("start_timeout_s", "How long opening and trying a graph may take, for each number of threads.")
@_time("drain_timeout_s", "How long running requests may take after SIGTERM.")
@_tls("tls_cert", "PEM certificate chain.", click.Path(path_type=Path))
@_tls("tls_key", "PEM private key.", click.Path(path_type=Path))
@_tls("tls_client_ca", "PEM roots: clients must show a certificate.", click.Path(path_type=Path))
@_viewer(
    "viewer_port",
    "Show texts in a browser, too: the port of that page; 0 picks a free one.  [default: no]",
    int,
)
@_viewer("viewer_host", "Address that the page listens on.")
@_viewer(
    "viewer_origin",
    "Public address of the page, such as https://lens.example.org, if browsers reach it by a DNS name or "
    "through a reverse proxy.",
)
@_log(
    "log_requests",
    "Log a line for each request: method, client, texts, tokens, status, times. Never the texts.",
)
def serve(source: Path, cache_dir: Path | None, **options: Any) -> None:  # noqa: ANN401 - fields of ServerConfig
    """Serve SOURCE over gRPC until SIGTERM.

    SOURCE is the directory of a bundle. It may also be a checkpoint, a directory or a hub id such as org/name
    or org/name@revision: then it is exported into a cache first, with its --precision, and the next start
    takes it from there. `attnlens list` shows what is there.

    Prints one line when ready. A bundle that was altered, or whose parity failed, is refused.
    """
    # gRPC's own lines on stderr are not our format, and a client can bring them about as often as it likes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from attnlens_cli.sources.resolve import resolve  # noqa: PLC0415 - heavy
    from attnlens_server.errors import StartupError  # noqa: PLC0415 - heavy
    from attnlens_server.server import serve as serve_bundle  # noqa: PLC0415 - heavy

    if options.get("engine", "onnxruntime") == "onnxruntime":
        import onnxruntime  # noqa: F401, PLC0415 - where it is missing, nothing is exported first

    _check_address_alone()
    try:
        config = ServerConfig(bundle=source, **options)
        bundle = resolve(source, cache_dir, graph_precision(config.precision))
        serve_bundle(dataclasses.replace(config, bundle=bundle), _print_ready)
    except ConfigError as error:
        raise ConfigFailure(error) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def _check_address_alone() -> None:
    """Reject --host and --port next to --address. Variables of an image may have them: they are ignored."""
    ctx = click.get_current_context()
    given = [
        f"--{name}"
        for name in ("address", "host", "port")
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given[:1] == ["--address"] and len(given) > 1:
        raise click.UsageError(
            f"--address and {given[1]} are both given: give --address alone, or --host and --port"
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
    if ready.viewer_url:
        click.echo(f"The viewer is at {ready.viewer_url}")
