"""`attnlens serve SOURCE`."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import PRECISIONS, PROVIDERS, config_option
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.show.printable import counted
from attnlens_cli.sources.options import cache_option, source_argument
from attnlens_server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from attnlens_server.server import Ready

EPILOG = """\b
Example:
  attnlens serve bundles/minilm --port 50051 --provider auto
  attnlens serve sentence-transformers/all-MiniLM-L6-v2"""


@click.command(cls=SectionCommand, epilog=EPILOG)
@source_argument
@cache_option
@config_option("host", "Address to listen on.")
@config_option("port", "Port to listen on; 0 picks a free one.")
@config_option(
    "address",
    "Where to listen, in place of --host and --port: unix:PATH, unix-abstract:NAME or HOST:PORT, the same as "
    "--address of the commands that ask a server.",
)
@config_option("socket_mode", "Permissions of the socket file of unix:PATH; who may write may connect.")
@config_option(
    "provider", "Where to run. With cuda, the server refuses to start unless CUDA runs the model.", PROVIDERS
)
@config_option(
    "precision",
    "What embeddings are computed in, if the bundle has it; fp16 is for a GPU, int8 for a CPU.",
    PRECISIONS,
)
@config_option("device_id", "Which GPU.")
@config_option("threads", "Threads that compute; 0: one a physical core.")
@config_option(
    "lanes",
    "Batches that run side by side; 0: one a thread on a CPU, 1 on CUDA. With 1, the weights are in memory "
    "once instead of twice.",
)
@config_option("max_batch_tokens", "Tokens of one batch, padding included; 0: 256 on a CPU, 8192 on CUDA.")
@config_option("max_attention_bytes", "Attention weights of the batches that run, in bytes.")
@config_option("explain", "Serve Explain and Compare; their graph is opened by the first request.")
@config_option(
    "max_masked_runs",
    "Runs with a token left out, and runs for input matrices of pairs, that one request may need together.",
)
@config_option("max_queue", "Texts that wait or run at a time; beyond, requests are refused.")
@config_option("max_inputs_per_request", "Texts in one request.")
@config_option("max_text_bytes", "Bytes of one text.")
@config_option("max_request_text_bytes", "Bytes of all texts of a request.")
@config_option("max_message_bytes", "Bytes of one reply.")
@config_option("max_reply_bytes", "Memory of all calls and of replies that are not read yet, in bytes.")
@config_option("max_calls", "Calls at a time.")
@config_option("accept_compression", "Accept compressed requests, which may be far larger than they look.")
@config_option("max_tokens", "Tokens of one text.  [default: the bundle's]", int)
@config_option("worker_threads", "Threads that tokenize and build replies.")
@config_option("stall_timeout_s", "How long a client may take to read a message; then its call is ended.")
@config_option("start_timeout_s", "How long opening and trying a graph may take, for each number of threads.")
@config_option("drain_timeout_s", "How long running requests may take after SIGTERM.")
@config_option("tls_cert", "PEM certificate chain.", click.Path(path_type=Path))
@config_option("tls_key", "PEM private key.", click.Path(path_type=Path))
@config_option("tls_client_ca", "PEM roots: clients must show a certificate.", click.Path(path_type=Path))
@config_option(
    "viewer_port",
    "Show texts in a browser, too: the port of that page; 0 picks a free one.  [default: no]",
    int,
)
@config_option("viewer_host", "Address that the page listens on.")
@config_option(
    "log_requests",
    "Log a line for each request: method, client, texts, tokens, status, times. Never the texts.",
)
def serve(source: Path, cache: Path | None, **options: Any) -> None:  # noqa: ANN401 - fields of ServerConfig
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

    try:
        config = ServerConfig(bundle=source, **options)
        bundle = resolve(source, cache, config.precision)
        serve_bundle(dataclasses.replace(config, bundle=bundle), _print_ready)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def _print_ready(ready: "Ready") -> None:
    parts = (
        f"model {ready.model}",
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
