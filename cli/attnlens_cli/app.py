"""The root command: global options, lazily imported subcommands, failure reports.

The value of an option comes from the command line, otherwise from the environment
(`ATTNLENS_<COMMAND>_<OPTION>`; for connection options also `ATTNLENS_<OPTION>`), otherwise from
`--config-file`, otherwise from the default.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from attnlens_cli.frame import failures, logs, settings
from attnlens_cli.frame.options import option, write_options

SECTIONS = {
    "Make and check bundles": {
        "export": ("bundles.export", "Export a checkpoint as a verified ONNX bundle."),
        "check": ("bundles.check", "Verify the files of a bundle and its parity with PyTorch."),
        "list": ("bundles.list_bundles", "List bundles with size, precisions, verdict and origin."),
        "layout": ("bundles.layout", "Prepare a bundle for Triton or OpenVINO Model Server."),
    },
    "Serve": {
        "try": ("serving.try_source", "Show tokens, embeddings and attention without a server."),
        "serve": ("serving.serve", "Serve a bundle or a checkpoint over gRPC."),
        "key": ("serving.key", "Create an API key for a client."),
        "deploy": ("serving.deploy", "Print files for systemd, HAProxy, Kubernetes and monitoring."),
        "bench": ("serving.bench", "Find the engine and settings of serve for this machine."),
    },
    "Ask a server": {
        "info": ("asking.info", "Show a served model: sizes, limits, parity, versions."),
        "health": ("asking.health", "Report whether a server is ready, for container probes."),
        "tokenize": ("asking.tokenize", "Show the tokens of a text: ids, spellings, offsets."),
        "embed": ("asking.embed", "Embed each line of a file."),
        "rerank": ("asking.rerank", "Sort documents by their relevance to a query."),
        "classify": ("asking.classify", "Show the labels of a text."),
        "encode": ("asking.encode", "Write all outputs of the model for texts: .npz or JSON."),
        "attend": ("asking.attend", "Show which tokens attend to each other."),
        "explain": ("asking.explain", "Explain an embedding or a similarity by words."),
        "compare": ("asking.compare", "Show why two texts are similar."),
        "view": ("asking.view", "Write an HTML page with explanations and attention."),
    },
    "Study a model": {
        "heads": ("studies.heads", "Measure the function of every attention head."),
        "teach": ("studies.teach", "Follow a token through one attention head, step by step."),
        "check-layer": ("studies.check_layer", "Check an attention layer written in PyTorch."),
        "profile": ("studies.profile", "Show the time of each part of the graph by text length."),
    },
    "Set up": {
        "completion": ("completion", "Print the completion script of a shell."),
    },
}
"""Subcommands by section of the help: the module below `attnlens_cli.commands`, and one line of help.

The command is the attribute of the module with the module's name.
"""
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


@dataclass
class Invocation:
    """State of the run that a failure report needs."""

    command_path: str = "attnlens"
    debug: bool = False


class LazyGroup(click.Group):
    """A group that imports the module of a subcommand when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a subcommand and return its command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _help = COMMANDS[cmd_name]
        attribute = module.rpartition(".")[2]
        return cast("click.Command", getattr(import_module(f"attnlens_cli.commands.{module}"), attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and validate its variables and its table in the configuration file."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:  # the shell is completing a command line
            raise failures.unknown_name("command", name, COMMANDS, ctx)
        invocation = ctx.find_object(Invocation)
        if invocation is not None:
            invocation.command_path = f"attnlens {name}"
        resolved = super().resolve_command(ctx, args)
        if resolved[1] is not None and not ctx.resilient_parsing:
            settings.warn_of_unknown_variables(ctx, name, resolved[1])
        if resolved[1] is not None and ctx.default_map is not None and name in ctx.default_map:
            ctx.default_map[name] = settings.known_options(
                resolved[1], ctx.default_map[name], f"table [{name}]"
            )
        return resolved

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as in click
        """Run the command. A closed output, as with `| head`, is not a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # receives the rest of the buffer
            return 0
        except SystemExit as error:  # raised by rich
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return 0

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the commands."""
        write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands without importing them."""
        del ctx
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_module, text) in commands.items()])


def _read_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        ctx.default_map = settings.read_config_file(path, ctx.command, COMMANDS)
        ctx.meta[failures.CONFIG_FILE] = path
    return path


@click.command(
    cls=LazyGroup,
    context_settings={
        "auto_envvar_prefix": "ATTNLENS",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="""\b
Example:
  attnlens export sentence-transformers/all-MiniLM-L6-v2 --output bundles/minilm
  attnlens serve bundles/minilm --port 50051
  attnlens attend "It rained, so it was wet." --address localhost:50051""",
)
@click.version_option(package_name="attnlens", message="attnlens %(version)s", allow_from_autoenv=False)
@option(
    "--config-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config_file,
    help="TOML file with one table of options per command, such as [embed].",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Minimum level of log messages to show.",
)
@option("--debug", is_flag=True, help="Show the traceback of a failure.")
@click.pass_obj
def attnlens(invocation: Invocation, log_level: str, debug: bool) -> None:
    """Serve embeddings, scores, attention and explanations of transformer encoders over gRPC."""
    invocation.debug = debug
    logs.configure(log_level, sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    0: success, including a closed output, as with `| head`. 1: failure. 2: usage error. 70: bug. 76: invalid
    response from a server. 130: interrupted.
    """
    invocation = Invocation(debug=failures.debug_in_environment())
    try:
        result: Any = attnlens.main(
            args=list(arguments), prog_name="attnlens", standalone_mode=False, obj=invocation
        )
    except Exception as error:  # noqa: BLE001 - the outermost boundary
        return failures.report(error, invocation.command_path, debug=invocation.debug)
    return result if isinstance(result, int) else 0
