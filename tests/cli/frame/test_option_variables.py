"""Every option has the environment variable ATTNLENS_<COMMAND>_<OPTION>, and no other name."""

import os
from collections.abc import Iterator
from unittest import mock

import click
import pytest
from click.core import ParameterSource

from attnlens_cli.app import COMMANDS, attnlens
from attnlens_cli.frame.options import SHARED_VARIABLES, Option
from attnlens_cli.frame.settings import known_options

ROOT = click.Context(attnlens, auto_envvar_prefix="ATTNLENS")
WITHOUT_VARIABLE = {("attnlens", "--version")}


def _commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    yield "attnlens", attnlens, ROOT
    for name in COMMANDS:
        command = attnlens.get_command(ROOT, name)
        assert command is not None
        yield name, command, click.Context(command, info_name=name, parent=ROOT)


OPTIONS = [
    (name, option, context)
    for name, command, context in _commands()
    for option in command.params
    if isinstance(option, click.Option)
]


def _derived(command: str, option: str) -> str:
    words = [] if command == "attnlens" else command.split("-")
    return "_".join(["attnlens", *words, *option.removeprefix("--").split("-")]).upper()


@pytest.mark.parametrize(
    ("command", "option", "context"), OPTIONS, ids=[f"{name} {option.opts[0]}" for name, option, _ in OPTIONS]
)
def test_variable_of_an_option_derives_from_the_names_of_command_and_option(
    command: str, option: click.Option, context: click.Context
) -> None:
    [long] = [name for name in option.opts if name.startswith("--")]
    value = "1" if option.is_flag else "value"
    by_parameter = f"{context.auto_envvar_prefix}_{str(option.name).upper()}"  # click's name
    derived = _derived(command, long)
    with mock.patch.dict(os.environ, {derived: value}, clear=True):
        result, source = option.consume_value(context, {})
    if (command, long) in WITHOUT_VARIABLE:
        assert source is not ParameterSource.ENVIRONMENT
        return
    assert source is ParameterSource.ENVIRONMENT
    assert result in (value, True, [value], (value,))
    if by_parameter != derived:
        with mock.patch.dict(os.environ, {by_parameter: value}, clear=True):
            assert option.consume_value(context, {})[1] is not ParameterSource.ENVIRONMENT


def test_shared_variables_are_those_of_the_shared_options() -> None:
    shared = {option for _, option, _ in OPTIONS if isinstance(option, Option) and option.is_shared}
    assert {_derived("attnlens", option.long_name) for option in shared} == SHARED_VARIABLES


def test_configuration_file_accepts_option_names_and_no_parameter_names() -> None:
    [command] = [command for name, command, _ in _commands() if name == "explain"]
    assert known_options(command, {"json": True, "method": ["rollout"]}, "table [explain]") == {
        "as_json": True,
        "methods": ["rollout"],
    }
    with pytest.raises(click.UsageError, match="no such option as_json in table"):
        known_options(command, {"as_json": True}, "table [explain]")
