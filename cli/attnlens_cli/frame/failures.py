"""Failure reports: one line on stderr and an exit code.

Exceptions of the attnlens packages and OSError have messages for the user. Any other exception is reported
as a bug. Tracebacks are printed only with `--debug` or ATTNLENS_DEBUG=1.
"""

import os
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import click
from click.core import ParameterSource

from attnlens_cli import how_to_install
from attnlens_cli.frame.options import Option
from attnlens_cli.printable import bounded, printable

CONFIG_FILE = "attnlens.config_file"
"""Key of the path of `--config-file` in `Context.meta`."""

FAILURE, USAGE, BUG, BAD_REPLY, INTERRUPTED = 1, 2, 70, 76, 130

REPORTED_COMMAND = "_ATTNLENS_REPORTED_COMMAND"
"""Environment variable of a child process: the command that the user ran, to be named in failures."""

# The extra that installs each module, unless it depends on the command.
_EXTRAS = {
    "fsspec": "bulk",
    "grpc_health": "server",
    "grpc_reflection": "server",
    "google.rpc": "server",
    "huggingface_hub": "export",
    "loky": "server",
    "matplotlib": "plot",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "pyarrow": "bulk",
    "torch": "export",
}
_EXTRAS_BY_COMMAND = {
    "attnlens bench": "server",
    "attnlens check": "export",
    "attnlens check-layer": "export",
    "attnlens embed": "server",
    "attnlens export": "export",
    "attnlens layout": "export",
    "attnlens profile": "export",
    "attnlens serve": "server",
    "attnlens teach": "export",
    "attnlens try": "server",
}
# Names of text arguments, and the start of click's message about an extra argument.
_TEXTS = {"text", "first", "second"}
_TOO_MANY = "Got unexpected extra argument"
# Remedy for a missing argument, by the names of command and parameter.
_IF_MISSING = {
    ("compare", "first"): "it compares two texts, each in quotes",
    ("compare", "second"): "it compares two texts, each in quotes",
    ("try", "source"): "use a bundle or a checkpoint, then texts in quotes",
    ("try", "texts"): "use a bundle or a checkpoint as SOURCE, then texts in quotes",
}
# Starts of click's own sentences. Other messages may start with a word of the user and are not changed.
_CLICK_STARTS = ("Could not open", "Got unexpected", "Invalid value", "Missing ", "No such", "Option '")


class BadReplyFailure(click.ClickException):
    """A response does not match the request. The exit code is EX_PROTOCOL of BSD's sysexits."""

    exit_code = BAD_REPLY


def debug_in_environment() -> bool:
    """Return whether ATTNLENS_DEBUG requests tracebacks. Applies to failures before options are parsed."""
    return os.environ.get("ATTNLENS_DEBUG", "").lower() in {"1", "true", "yes", "on"}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the most similar known name, or "" if none is similar."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {matches[0]}?)" if matches else ""


def unknown_name(
    kind: str, name: str, known: Iterable[str], ctx: click.Context | None = None
) -> click.UsageError:
    """Return the error for an unknown name."""
    names = list(known)
    return click.UsageError(f"no such {kind} {name}{nearest(name, names)}: there are {', '.join(names)}", ctx)


def report(error: Exception, command_path: str, *, debug: bool) -> int:
    """Print `error` as one line on stderr and return the exit code."""
    if debug and not isinstance(error, (click.exceptions.NoArgsIsHelpError, click.Abort)):
        lines = "".join(traceback.format_exception(error)).split("\n")
        click.echo("\n".join(printable(line) for line in lines), err=True, nl=False)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return USAGE
    if isinstance(error, click.Abort):
        click.echo(f"{command_path}: interrupted", err=True)
        return INTERRUPTED
    message, code = _describe(error, command_path)
    if isinstance(error, click.UsageError) and error.ctx is not None:
        command_path = error.ctx.command_path
    command_path = os.environ.get(REPORTED_COMMAND, command_path)
    message = "; ".join((message, *_notes(error)))
    click.echo(f"{command_path}: {printable(bounded(' '.join(message.split())))}", err=True)
    return code


def _notes(error: BaseException | None) -> Iterator[str]:
    """Yield the notes of the error and of its causes."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__cause__


def _describe(error: Exception, command_path: str) -> tuple[str, int]:
    if isinstance(error, click.NoSuchOption):
        known = error.possibilities or []
        remedy = _root_option_remedy(error) or nearest(error.option_name, known)
        return f"no such option {error.option_name}{remedy}", USAGE
    if isinstance(error, click.ClickException):
        return _as_clause(error.format_message()) + _remedy(error), error.exit_code
    if isinstance(error, ImportError):
        missing = _missing_module(error, command_path)
        if missing is not None:
            module, extra = missing
            return f"{module} is not installed: {how_to_install(extra)}", USAGE
    if type(error).__module__.startswith("attnlens"):
        return str(error), FAILURE
    if isinstance(error, OSError):
        return _describe_os_error(error), FAILURE
    kind = type(error).__name__
    return f"this is a bug: {kind}: {error} (run `attnlens --debug ...` to see the traceback)", BUG


def _root_option_remedy(error: click.NoSuchOption) -> str:
    """Return the remedy for a global option given after the command, or ""."""
    ctx = error.ctx
    if ctx is None or ctx.parent is None:
        return ""
    for option in ctx.find_root().command.params:
        if error.option_name in option.opts and isinstance(option, click.Option):
            value = "" if option.is_flag else f" {option.make_metavar(ctx)}"
            line = f"attnlens {error.option_name}{value} {ctx.info_name} ..."
            return f": it goes before the command, as in `{line}`"
    return ""


def _remedy(error: click.ClickException) -> str:
    """Return the source of an invalid value, unless it is the command line, or what is missing."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is None:
        return ""
    if isinstance(error, click.MissingParameter) and error.param is not None:
        remedy = _IF_MISSING.get((str(ctx.info_name), str(error.param.name)))
        return f": {remedy}" if remedy else ""
    if isinstance(error, click.BadParameter):
        hint = error.param_hint if isinstance(error.param_hint, str) else ""
        for option in ctx.command.params:
            if option is not error.param and hint.strip("'") not in option.opts:
                continue
            source = ctx.get_parameter_source(str(option.name))
            if source is ParameterSource.ENVIRONMENT and isinstance(option, Option):
                return f" (from the variable {option.variable_set(ctx)})"
            if source is ParameterSource.DEFAULT_MAP:
                return f" (from {ctx.find_root().meta[CONFIG_FILE]})"
        return ""
    takes_text = any(parameter.name in _TEXTS for parameter in ctx.command.params)
    return ": put quotes around a text" if takes_text and error.message.startswith(_TOO_MANY) else ""


def _as_clause(message: str) -> str:
    """Return the message. A sentence of click loses its capital and its period, to fit into the line."""
    if not message.startswith(_CLICK_STARTS):
        return message
    return message[:1].lower() + message[1:].removesuffix(".")


def _missing_module(error: ImportError, command_path: str) -> tuple[str, str] | None:
    """Return the missing module and the extra that installs it, or None if no extra does."""
    if not error.name:
        return None
    root = error.name.partition(".")[0]
    if root in {"onnxruntime", "safetensors", "tokenizers"} and command_path in _EXTRAS_BY_COMMAND:
        return root, _EXTRAS_BY_COMMAND[command_path]
    return next(((name, extra) for name, extra in _EXTRAS.items() if name in {root, error.name}), None)


def _describe_os_error(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror.lower()}"
