"""`attnlens try`: a first look at a model, without a running server."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli import how_to_install
from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, ConfigFailure, config_option
from attnlens_cli.commands.options import cache_option, source_argument
from attnlens_cli.frame.options import TEXT, Command
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.printable import printable
from attnlens_server.config import ConfigError, EngineName, Precision, ServerConfig, graph_precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from attnlens_cli.show.first_look import Look
    from attnlens_client import Client, Explanation, ModelInfo

EPILOG = """\b
Example:
  attnlens try sentence-transformers/all-MiniLM-L6-v2 "It rained." "The street was wet."
  attnlens try bundles/minilm "A man is playing a guitar.\""""

_SERVER_MODULES = ("onnxruntime", "tokenizers", "grpc_health", "grpc_reflection", "h11", "loky")
_MAX_CHARACTERS = 70  # maximum length of the text in suggested commands
_NUM_LARGEST = 3  # one of them may be the weight on the word itself


@click.command("try", cls=Command, epilog=EPILOG)
@source_argument
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True, type=TEXT)
@cache_option
@config_option("engine", "Engine that runs the model.", ENGINES, section="Options")
@config_option(
    "precision",
    "Precision of embeddings and of the export of a checkpoint. bf16 needs --engine openvino.",
    PRECISIONS,
    section="Options",
)
def try_source(
    source: Path, texts: tuple[str, ...], cache_dir: Path | None, engine: EngineName, precision: Precision
) -> None:
    """Show tokens, embedding, contributions of words, attention and similarities of each TEXT.

    A classifier shows labels instead of an embedding. A reranker sorts the other texts by their relevance to
    the first one.

    SOURCE is a bundle or a checkpoint, as in `attnlens serve`. Starts a temporary server.
    """
    missing = [name for name in _SERVER_MODULES if find_spec(name) is None]
    if missing:
        raise click.UsageError(f"{missing[0]} is not installed: {how_to_install('server')}")
    try:
        ServerConfig(bundle=source, engine=engine, precision=precision)
    except ConfigError as error:
        raise ConfigFailure(error) from error
    from attnlens.bundle import read_manifest
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.first_look import print_look, print_model, print_ranking, print_similarities
    from attnlens_cli.sources.child import child_server
    from attnlens_cli.sources.source import resolve
    from attnlens_client import Client

    bundle = resolve(source, cache_dir, graph_precision(precision))
    if all(file.path != "tokenizer.json" for file in read_manifest(bundle).files):
        raise click.ClickException(
            f"{source} has no tokenizer, which this command needs: export a bundle with `attnlens export "
            "--tokenizer FILE`, or serve it and send token ids with the Python client"
        )
    options = ["--engine", engine, "--precision", precision]
    with stopped_by_signals(), child_server(bundle, options) as address, Client(address) as client:
        model = client.get_model()
        looks = _looks(client, model, texts)
        is_ranked = len(model.labels) == 1 and len(texts) > 1
        ranked = client.rerank(texts[0], texts[1:]) if is_ranked else []
    console = make_console()
    print_model(console, model)
    for look in looks:
        print_look(console, look)
    if ranked:
        print_ranking(console, texts[0], ranked)
    elif len(looks) > 1 and not model.labels:
        print_similarities(console, looks, model.similarity)
    cache = (
        f" --cache-dir {shlex.quote(str(cache_dir))}" if cache_dir is not None and bundle != source else ""
    )
    _print_next(console, f"{shlex.quote(str(source))}{cache}", texts[0], model)


def _print_next(console: "Console", serve_arguments: str, text: str, model: "ModelInfo") -> None:
    """Print commands to run next."""
    text = printable(text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…")
    console.print()
    console.print("next", style="bold")
    console.print(f"  attnlens serve {serve_arguments}", soft_wrap=True)
    method = f"embed([{text!r}])"
    if len(model.labels) == 1:
        method = f"rerank({text!r}, documents)"
    elif model.labels:
        method = f"classify([{text!r}])"
    else:
        console.print(f"  attnlens view {shlex.quote(text)} --output page.html", soft_wrap=True)
    call = f"Client('127.0.0.1:50051').{method}"
    console.print(f"  python: from attnlens_client import Client; {call}", soft_wrap=True)


def _looks(client: "Client", model: "ModelInfo", texts: "Sequence[str]") -> "list[Look]":
    from attnlens.reductions import AttentionReduction, TopK
    from attnlens_cli.show.attention_map import AttentionMap
    from attnlens_cli.show.first_look import Look
    from attnlens_client import AttentionQuery

    weights = [output for output in model.outputs if output.role == "attention_weights"]
    is_mapped = bool(weights) and model.state == "ready"
    sums_to_one = all(output.row_sum == "one" for output in weights)
    reduction = AttentionReduction(
        level="words",
        special_tokens="drop" if sums_to_one else "keep",
        layers="mean",
        form=TopK(_NUM_LARGEST),
    )
    query = AttentionQuery(view="head_mean", reduction=reduction) if is_mapped else None
    encoded = client.encode(texts, attention=query, last_hidden_state=False, truncate=True)
    vectors: Sequence[Any] = [None] * len(texts) if model.labels else [*client.embed(texts, truncate=True)]
    labels: Sequence[Any] = [()] * len(texts)
    if len(model.labels) > 1:
        labels = client.classify(texts, truncate=True).top()
    explanations: Sequence[Explanation | None] = [None] * len(texts)
    if "contributions" in model.explain_methods:
        # A classifier with several labels explains one of them.
        tops = [ranked[0][0] if ranked else None for ranked in labels]
        explanations = [
            client.explain([text], level="words", truncate=True, label=label)[0]
            for text, label in zip(texts, tops, strict=True)
        ]
    prompt = model.prompts.get(model.default_prompt_name, "")
    maps = [
        AttentionMap(texts={"text": text, "prompt": prompt}, model=model, result=result)
        if query is not None
        else None
        for text, result in zip(texts, encoded, strict=True)
    ]
    return [Look(*parts) for parts in zip(texts, encoded, vectors, maps, explanations, labels, strict=True)]
