"""`attnlens serve DIR`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from attnlens_server.config import Precision, Provider

if TYPE_CHECKING:
    from attnlens_server.server import Ready

EPILOG = "Example: attnlens serve bundles/minilm --port 50051 --provider auto"


@click.command(epilog=EPILOG)
@click.argument("bundle", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=50051, show_default=True, help="Port to listen on; 0 picks a free one.")
@click.option(
    "--provider",
    type=click.Choice(get_args(Provider)),
    default="auto",
    show_default=True,
    help="Where to run. With cuda, the server refuses to start unless CUDA runs the model.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="fp32",
    show_default=True,
    help="What embeddings are computed in, if the bundle has it; fp16 is for a GPU, int8 for a CPU.",
)
@click.option("--device-id", default=0, show_default=True, help="Which GPU.")
@click.option("--threads", default=0, show_default=True, help="Threads that compute; 0: one a physical core.")
@click.option(
    "--lanes",
    default=0,
    show_default=True,
    help="Batches that run side by side; 0: one a thread on a CPU, 1 on CUDA. With 1, the weights are in "
    "memory once instead of twice.",
)
@click.option(
    "--max-batch-tokens",
    default=0,
    show_default=True,
    help="Tokens of one batch, padding included; 0: 256 on a CPU, 8192 on CUDA.",
)
@click.option(
    "--max-attention-bytes",
    default=256 << 20,
    show_default=True,
    help="Attention weights of the batches that run, in bytes.",
)
@click.option(
    "--max-queue",
    default=2048,
    show_default=True,
    help="Texts that wait or run at a time; beyond, requests are refused.",
)
@click.option("--max-inputs-per-request", default=512, show_default=True, help="Texts in one request.")
@click.option("--max-text-bytes", default=1 << 17, show_default=True, help="Bytes of one text.")
@click.option(
    "--max-request-text-bytes", default=1 << 22, show_default=True, help="Bytes of all texts of a request."
)
@click.option("--max-message-bytes", default=32 << 20, show_default=True, help="Bytes of one reply.")
@click.option(
    "--max-reply-bytes",
    default=512 << 20,
    show_default=True,
    help="Memory of all calls and of replies that are not read yet, in bytes.",
)
@click.option("--max-calls", default=4096, show_default=True, help="Calls at a time.")
@click.option(
    "--accept-compression",
    is_flag=True,
    help="Accept compressed requests, which may be far larger than they look.",
)
@click.option("--max-tokens", type=int, help="Tokens of one text.  [default: the bundle's]")
@click.option(
    "--worker-threads", default=2, show_default=True, help="Threads that tokenize and build replies."
)
@click.option(
    "--stall-timeout-s",
    default=30.0,
    show_default=True,
    help="How long a client may take to read a message; then its call is ended.",
)
@click.option(
    "--start-timeout-s",
    default=600.0,
    show_default=True,
    help="How long opening and trying a graph may take, for each number of threads.",
)
@click.option(
    "--drain-timeout-s",
    default=30.0,
    show_default=True,
    help="How long running requests may take after SIGTERM.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM certificate chain.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM private key.")
@click.option("--tls-client-ca", type=click.Path(path_type=Path), help="PEM roots: clients must identify.")
def serve(**options: Any) -> None:  # noqa: ANN401 - each is a field of ServerConfig
    """Serve the bundle in DIR over gRPC until SIGTERM.

    Prints one line when ready. A bundle that was altered, or whose parity failed, is refused.
    """
    # gRPC's own lines on stderr are not our format, and a client can bring them about as often as it likes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from attnlens_server.config import ConfigError, ServerConfig  # noqa: PLC0415 - heavy
    from attnlens_server.errors import StartupError  # noqa: PLC0415 - heavy
    from attnlens_server.server import serve as serve_bundle  # noqa: PLC0415 - heavy

    try:
        serve_bundle(ServerConfig(**options), _print_ready)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def _print_ready(ready: "Ready") -> None:
    click.echo(
        f"attnlens is ready at {ready.address}: model {ready.model}, {ready.execution_provider}, "
        f"warm-up {ready.warm_up_s:.2f} s"
    )
