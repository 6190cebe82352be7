"""`attnlens check-layer`: check an attention layer that the user has written in PyTorch."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import dataclasses
import inspect
import json
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.frame.options import Command, in_section

if TYPE_CHECKING:
    from torch import nn

EPILOG = """\b
Example:
  attnlens check-layer my_layer.py:SelfAttention
  attnlens check-layer my_layer.py:CausalSelfAttention --causal --hidden-size 64 --num-heads 8
  attnlens check-layer my_layer.py:make_layer --trained --reference my_layer.py:reference"""

_SIZES = in_section("Layer")
_EXPECTED = in_section("Expected properties")
_OUTPUT = in_section("Output")

# Names of constructor parameters, by the option or default that they receive.
_HIDDEN_SIZE_NAMES = {
    "d_in", "d_model", "d_out", "dim", "embed_dim", "embed_size", "embedding_dim", "emb_dim", "hidden_dim",
    "hidden_size", "in_features", "input_dim", "model_dim", "n_embd", "n_embed",
}  # fmt: skip
_NUM_HEADS_NAMES = {"heads", "n_head", "n_heads", "nhead", "num_attention_heads", "num_heads"}
_HEAD_SIZE_NAMES = {"d_head", "d_k", "d_v", "dim_head", "head_dim", "head_size"}
_MAX_TOKENS_NAMES = {"block_size", "context_length", "max_len", "max_length", "max_seq_len", "max_tokens"}
_DROPOUT_NAMES = {"attn_dropout", "drop", "dropout", "dropout_p", "p_drop", "p_dropout"}
_DEFAULT_HEADS, _MAX_TOKENS, _DROPOUT = 4, 256, 0.1


def _split_target(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:  # noqa: ANN401
    """Split FILE.py:NAME."""
    if value is None:
        return None
    file, _, name = value.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise click.BadParameter(f"{value!r} is not FILE.py:NAME, such as my_layer.py:SelfAttention")
    if not Path(file).is_file():
        raise click.BadParameter(f"there is no file {file}")
    return Path(file), name


def _split_arguments(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    """Split each NAME=VALUE. Values are JSON, or text if they are not valid JSON."""
    arguments: dict[str, Any] = {}
    for each in values:
        name, separator, text = each.partition("=")
        if not separator or not name.isidentifier():
            raise click.BadParameter(f"{each!r} is not NAME=VALUE, such as bias=false")
        try:
            arguments[name] = json.loads(text)
        except json.JSONDecodeError:
            arguments[name] = text
    return arguments


@click.command(name="check-layer", cls=Command, epilog=EPILOG)
@click.argument("target", metavar="FILE.py:NAME", callback=_split_target)
@_SIZES(
    "--hidden-size",
    type=click.IntRange(1, 8192),
    default=64,
    show_default=True,
    help="Size of hidden states.",
)
@_SIZES(
    "--num-heads",
    type=click.IntRange(1, 1024),
    help="Number of heads.  [default: 4 if the constructor has such a parameter]",
)
@_SIZES(
    "--arg",
    "arguments",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_split_arguments,
    help="Constructor argument in JSON; may be repeated.  [default: sizes by common parameter names]",
)
@_EXPECTED("--causal", is_flag=True, help="Tokens must not attend to later tokens.")
@_EXPECTED(
    "--uses-positions", is_flag=True, help="The layer uses positions itself, such as rotary embeddings."
)
@_EXPECTED("--trained", is_flag=True, help="Weights are trained: do not check the initialization.")
@_EXPECTED("--scale", type=float, help="Expected factor of scores.  [default: 1 / sqrt(head size)]")
@_EXPECTED(
    "--mask",
    "mask_style",
    type=click.Choice(["keep", "ignore", "additive"]),
    help="Meaning of the mask argument: True for tokens, True for padding, or a float added to scores.  "
    "[default: derived from its name]",
)
@_EXPECTED(
    "--reference",
    metavar="FILE.py:NAME",
    callback=_split_target,
    help="Function that maps hidden states to the expected output.",
)
@_OUTPUT("--json", "as_json", is_flag=True, help="Print all checks as JSON.")
def check_layer(
    target: tuple[Path, str],
    hidden_size: int,
    num_heads: int | None,
    arguments: dict[str, Any],
    causal: bool,
    uses_positions: bool,
    trained: bool,
    scale: float | None,
    mask_style: Any,  # noqa: ANN401 - a Literal of attnlens_model
    reference: tuple[Path, str] | None,
    as_json: bool,
) -> None:
    """Check an attention layer in FILE.py, and explain each mistake that is found.

    NAME is a subclass of torch.nn.Module, an instance, or a function without arguments that returns one.
    The layer maps hidden states (batch, tokens, hidden size) to an output of the same shape, optionally
    followed by attention weights. It may take a padding mask, named mask, attention_mask, padding_mask or
    key_padding_mask.

    FILE.py is executed. The exit code is 1 if a check fails.
    """
    from attnlens_model.testing import check_attention

    layer, heads = _make_layer(target, hidden_size, num_heads, arguments)
    report = check_attention(
        layer,
        hidden_size=hidden_size,
        num_heads=heads,
        is_causal=causal,
        uses_positions=uses_positions,
        is_trained=trained,
        scale=scale,
        mask_style=mask_style,
        reference=None if reference is None else _load(*reference),
    )
    if as_json:
        items = [dataclasses.asdict(item) | {"status": item.status.value} for item in report.items]
        click.echo(json.dumps({"layer": report.layer, "passed": report.passed, "items": items}, indent=2))
    else:
        click.echo(str(report))
    if not report.passed:
        raise click.exceptions.Exit(1)


def _load(path: Path, name: str) -> Any:  # noqa: ANN401 - any object of the file
    """Return an object of a Python file."""
    module = _execute(path)
    if not hasattr(module, name):
        raise click.ClickException(f"{path} has no {name}")
    return getattr(module, name)


@cache
def _execute(path: Path) -> ModuleType:
    """Execute a Python file once."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None  # noqa: S101 - ensured by the suffix
    assert spec.loader is not None  # noqa: S101
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise click.ClickException(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


def _make_layer(
    target: tuple[Path, str], hidden_size: int, num_heads: int | None, arguments: dict[str, Any]
) -> tuple["nn.Module", int | None]:
    """Return the layer and its number of heads, or None if it is unknown."""
    import torch
    from torch import nn

    torch.manual_seed(0)  # the same initial weights in each run
    found, where = _load(*target), f"{target[0]}:{target[1]}"
    if isinstance(found, nn.Module):
        if arguments:
            raise click.UsageError(f"{where} is an instance: --arg needs a class or a function")
        return found, num_heads
    if not callable(found):
        raise click.ClickException(f"{where} is not a module, a class or a function: use one of these")
    values, heads = _constructor_arguments(found, where, hidden_size, num_heads, arguments)
    try:
        layer = found(**values)
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise click.ClickException(f"{where}({shown}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(layer, nn.Module):
        raise click.ClickException(f"{where} returned {type(layer).__name__}: return a torch.nn.Module")
    return layer, heads


def _constructor_arguments(
    make: Any,  # noqa: ANN401 - a class or a function
    where: str,
    hidden_size: int,
    num_heads: int | None,
    arguments: dict[str, Any],
) -> tuple[dict[str, Any], int | None]:
    """Return the arguments for a constructor, by common parameter names, and the number of heads."""
    parameters = inspect.signature(make).parameters
    if unknown := [name for name in arguments if name not in parameters]:
        raise click.UsageError(f"{where} has no parameter {unknown[0]}: it has {', '.join(parameters)}")
    has_heads = any(name in _NUM_HEADS_NAMES for name in parameters)
    heads = num_heads or (_DEFAULT_HEADS if has_heads else None)
    defaults = [
        (_HIDDEN_SIZE_NAMES, hidden_size),
        (_NUM_HEADS_NAMES, heads),
        (_HEAD_SIZE_NAMES, hidden_size // (heads or 1)),
        (_MAX_TOKENS_NAMES, _MAX_TOKENS),
        (_DROPOUT_NAMES, _DROPOUT),
    ]
    values = {
        name: value
        for names, value in defaults
        for name in parameters
        if name in names and name not in arguments
    } | arguments
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in values
        and parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if missing:
        raise click.UsageError(
            f"{where} needs {', '.join(missing)}: give --arg {missing[0]}=VALUE, or name a function without "
            "arguments that returns the layer"
        )
    return values, heads
