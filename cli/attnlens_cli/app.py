"""The root command: global options, subcommands loaded when asked for, one line for every failure.

A subcommand is the attribute of the module in `SECTIONS` that has the module's name. The value of an option
comes from the command line, else the environment (`ATTNLENS_NAME_OPTION`; options of the server also
`ATTNLENS_OPTION`, for all commands), else the file given by `--config-file`, else the default.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from attnlens_cli.frame import config_file, failures, logs, variables
from attnlens_cli.frame.sections import write_options

SECTIONS = {
    "Make and check bundles": {
        "export": ("bundles.export", "Turn a checkpoint into a verified ONNX bundle."),
        "check": ("bundles.check", "Check a bundle: hashes, then parity with PyTorch."),
        "list": ("bundles.list_bundles", "List bundles: sizes, precisions, verdict, where from."),
        "layout": ("bundles.layout", "Lay a bundle out for Triton or OpenVINO Model Server."),
    },
    "Serve": {
        "try": ("serving.try_source", "Show what a model makes of a text, in one go."),
        "serve": ("serving.serve", "Serve a bundle or a checkpoint over gRPC."),
        "bench": ("serving.bench", "Find the engine and settings of serve for this machine."),
    },
    "Ask a server": {
        "info": ("asking.info", "Show a served model: sizes, limits, parity, versions."),
        "health": ("asking.health", "Tell whether a server serves, for probes of containers."),
        "tokenize": ("asking.tokenize", "Show the tokens of a text: ids, spellings, places."),
        "embed": ("asking.embed", "Turn the lines of a file into vectors."),
        "encode": ("asking.encode", "Write all that the model computes of texts: .npz or JSON."),
        "attend": ("asking.attend", "Show which tokens attend to which."),
        "explain": ("asking.explain", "Show which words made a vector, or a similarity."),
        "compare": ("asking.compare", "Show why two texts are similar."),
        "view": ("asking.view", "Write a page: what made a vector, and its attention."),
    },
    "Study a model": {
        "heads": ("studies.heads", "Measure what every attention head does."),
        "teach": ("studies.teach", "Walk a token through one attention head, step by step."),
        "profile": ("studies.profile", "Show which part of the graph takes the time, by length."),
    },
    "Set up": {
        "completion": ("completion", "Print the script that lets a shell complete commands and options."),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
"""Each subcommand: its module below `attnlens_cli.commands`, and one line of help."""


@dataclass
class Invocation:
    """What the failure handler needs to know about the run."""

    command_path: str = "attnlens"
    debug: bool = False


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of a first use."""
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
        """Find the command, note its name for failures, and check its variables and its table of the file."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:  # as when a shell completes a line
            raise failures.unknown_name("command", name, COMMANDS, ctx)
        invocation = ctx.find_object(Invocation)
        if invocation is not None:
            invocation.command_path = f"attnlens {name}"
        resolved = super().resolve_command(ctx, args)
        if resolved[1] is not None and not ctx.resilient_parsing:
            variables.warn_of_unknown(self, name, resolved[1], COMMANDS)
        if resolved[1] is not None and ctx.default_map is not None and name in ctx.default_map:
            ctx.default_map[name] = config_file.known_options(
                resolved[1], ctx.default_map[name], f"table [{name}]"
            )
        return resolved

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - what a command returns
        """Run the command. It succeeds if the reader of its output leaves early, as `head` does."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
            return 0
        except SystemExit as error:  # rich has done the same
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return 0

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options as each command does, then the commands."""
        write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        del ctx
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_module, text) in commands.items()])


def _read_config_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        ctx.default_map = config_file.read(path, ctx.command, COMMANDS)
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
@click.version_option(package_name="attnlens", message="attnlens %(version)s")
@click.option(
    "--config-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config_file,
    help="Options in TOML: one table for each command, for instance [embed].",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least important log messages to show.",
)
@click.option("--debug", is_flag=True, help="Show a traceback where something fails.")
@click.pass_obj
def attnlens(invocation: Invocation, log_level: str, debug: bool) -> None:
    """Contextual embeddings and attention weights of transformer encoders, over gRPC."""
    invocation.debug = debug
    logs.configure(log_level, sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    0, 1 failure, 2 usage, 70 bug, 76 a server's reply is wrong, 130 interrupted. Also 0 if the reader of the
    output has left, as `head` does.
    """
    invocation = Invocation(debug=failures.debug_in_environment())
    try:
        result: Any = attnlens.main(
            args=list(arguments), prog_name="attnlens", standalone_mode=False, obj=invocation
        )
    except Exception as error:  # noqa: BLE001 - the outermost edge: every failure becomes one line
        return failures.report(error, invocation.command_path, debug=invocation.debug)
    return result if isinstance(result, int) else 0
