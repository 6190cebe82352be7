"""Every failure of a command becomes one line on stderr and an exit code.

An exception class of our own packages is a message for the user, and so is an OSError; any other
exception is a bug and says so. Tracebacks are shown only with `--debug` or ATTNLENS_DEBUG=1.
"""

import os
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import partial

import click
from click.core import ParameterSource

from attnlens_cli.frame.extras import how_to_install
from attnlens_cli.show.printable import printable

CONFIG_FILE = "attnlens.config_file"
"""The key of the path of `--config-file` in `Context.meta`."""

FAILURE, USAGE, BUG, BAD_REPLY, INTERRUPTED = 1, 2, 70, 76, 130

REPORTED_COMMAND = "_ATTNLENS_REPORTED_COMMAND"
"""The environment variable with the command that the user ran, if it runs another one in a child process."""

# The extra that installs a module, for modules where it does not depend on the command.
_EXTRAS = {
    "grpc_health": "server",
    "grpc_reflection": "server",
    "google.rpc": "server",
    "huggingface_hub": "export",
    "loky": "server",
    "matplotlib": "plot",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "sentencepiece": "export",
    "torch": "export",
}
_EXTRAS_BY_COMMAND = {
    "attnlens bench": "server",
    "attnlens check": "export",
    "attnlens export": "export",
    "attnlens layout": "export",
    "attnlens profile": "export",
    "attnlens serve": "server",
    "attnlens teach": "export",
    "attnlens try": "server",
}
# The names of arguments that are texts, and how click begins to say that there is one argument more.
_TEXTS = {"text", "first", "second"}
_TOO_MANY = "Got unexpected extra argument"
# What to say of an argument that is missing: the command's name, and the parameter's.
_IF_MISSING = {
    ("compare", "first"): "it compares two texts, each in quotes",
    ("compare", "second"): "it compares two texts, each in quotes",
    ("try", "source"): "give a bundle or a checkpoint, then texts in quotes",
    ("try", "texts"): "give a bundle or a checkpoint as SOURCE, then texts in quotes",
}
# How click begins its own sentences. Other messages may begin with the user's words, which stay as they are.
_OF_CLICK = ("Could not open", "Got unexpected", "Invalid value", "Missing ", "No such", "Option '")


class BadReplyFailure(click.ClickException):
    """A server's reply is not what was asked for. The code is EX_PROTOCOL of BSD's sysexits."""

    exit_code = BAD_REPLY


def debug_in_environment() -> bool:
    """Tell whether ATTNLENS_DEBUG asks for tracebacks, for failures before options are parsed."""
    return os.environ.get("ATTNLENS_DEBUG", "").lower() in {"1", "true", "yes", "on"}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` if `name` looks like a known name with a typing error, else nothing."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {matches[0]}?)" if matches else ""


def unknown_name(
    kind: str, name: str, known: Iterable[str], ctx: click.Context | None = None
) -> click.UsageError:
    """Return the error for a name that does not exist."""
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
    click.echo(f"{command_path}: {printable(' '.join(message.split()))}", err=True)
    return code


def _notes(error: BaseException | None) -> Iterator[str]:
    """Yield the notes on the error and on the errors that caused it."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__cause__


def _describe(error: Exception, command_path: str) -> tuple[str, int]:
    if isinstance(error, click.NoSuchOption):
        known = error.possibilities or []
        remedy = _before_the_command(error) or nearest(error.option_name, known)
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


def variable_of_command(option: click.Parameter, ctx: click.Context) -> str:
    """Return the name of the environment's variable for an option of one command."""
    return f"{ctx.auto_envvar_prefix}_{str(option.name).upper()}"


def _before_the_command(error: click.NoSuchOption) -> str:
    """Say where an option of the root belongs that was given to a command; nothing for other options."""
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
    """Say where a wrong value comes from that is not on the command line, and when quotes are missing."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is None:
        return ""
    if isinstance(error, click.MissingParameter) and error.param is not None:
        told = _IF_MISSING.get((str(ctx.info_name), str(error.param.name)))
        return f": {told}" if told else ""
    if isinstance(error, click.BadParameter):
        hint = error.param_hint if isinstance(error.param_hint, str) else ""
        for option in ctx.command.params:
            is_it = option is error.param or hint.strip("'") in option.opts
            if is_it and ctx.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT:
                named = getattr(option, "variable", partial(variable_of_command, option))
                return f" (from the variable {named(ctx)})"
            if is_it and ctx.get_parameter_source(str(option.name)) is ParameterSource.DEFAULT_MAP:
                return f" (from {ctx.find_root().meta[CONFIG_FILE]})"
        return ""
    takes_text = any(parameter.name in _TEXTS for parameter in ctx.command.params)
    return ": put quotes around a text" if takes_text and error.message.startswith(_TOO_MANY) else ""


def _as_clause(message: str) -> str:
    """Return the message as the end of a line: a sentence of click without its capital and full stop."""
    if not message.startswith(_OF_CLICK):
        return message
    return message[:1].lower() + message[1:].removesuffix(".")


def _missing_module(error: ImportError, command_path: str) -> tuple[str, str] | None:
    """Return the missing module and the extra that installs it; None if no extra does."""
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
