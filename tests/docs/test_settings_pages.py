"""docs/settings.md and docs/options.md: options, variables, the configuration file and exit codes."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from attnlens_cli.app import COMMANDS, Invocation, attnlens
from attnlens_cli.frame import failures, settings
from attnlens_server.config import ServerConfig
from served import ServerProcess

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "settings.md").read_text("utf-8")
[EXAMPLE] = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "attnlens.toml"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def options_of(name: str, tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that a command receives from its table in the example."""
    context = click.Context(attnlens)
    command = attnlens.get_command(context, name)
    assert command is not None
    values = settings.known_options(command, tables[name], name)
    options = {option.name: option for option in command.params}
    for file in ("ca.pem", "server.pem", "server.key"):
        (folder / file).touch()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        return {key: options[key].type_cast_value(context, value) for key, value in values.items()}


def test_every_example_table_has_options_of_its_command(example: Path) -> None:
    tables = settings.read_config_file(example, attnlens, COMMANDS)
    assert tables.pop("log_level") == "warning"
    assert list(tables) == ["serve", "info", "embed", "attend", "export"]
    for name in tables:
        assert options_of(name, tables, example.parent)


def test_serve_table_is_a_valid_server_configuration(example: Path) -> None:
    tables = settings.read_config_file(example, attnlens, COMMANDS)
    options = options_of("serve", tables, example.parent)
    config = ServerConfig(bundle=Path("bundle"), **options)
    assert (config.max_concurrent_inputs, config.explain, config.tls_key) == (4096, False, Path("server.key"))


def test_command_calls_the_server_in_the_example(example: Path, minilm_server: ServerProcess) -> None:
    text = EXAMPLE.replace("localhost:50051", minilm_server.address).replace('tls-ca = "ca.pem"\n', "")
    example.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(attnlens, ["--config-file", str(example), "info"], obj=Invocation())
    assert result.exit_code == 0, result.output
    assert minilm_server.address in result.output


def test_exit_codes_match_the_commands() -> None:
    [listed] = re.findall(r"^## Exit codes\n.*?\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    codes = [int(code) for row in listed.splitlines() for code in re.findall(r"\d+", row.split("|")[1])]
    known = [failures.FAILURE, failures.USAGE, failures.BUG, failures.BAD_REPLY, failures.INTERRUPTED]
    assert codes == [0, *known, 143]


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [("ATTNLENS_SERVE_MAX_CONCURRENT_INPUTS", ["serve", "."]), ("ATTNLENS_INFO_TIMEOUT_S", ["info"])],
)
def test_listed_variable_sets_its_option(variable: str, arguments: list[str]) -> None:
    assert f"`{variable}`" in (DOCS / "options.md").read_text("utf-8")
    result = CliRunner(env={variable: "x:y"}).invoke(attnlens, arguments, obj=Invocation())
    assert result.exit_code == 2
    assert "'x:y' is not a valid" in result.output


def test_options_page_matches_the_commands() -> None:
    spec = importlib.util.spec_from_file_location("list_options", DOCS / "list_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (DOCS / "options.md").read_text("utf-8")
    assert written == module.page(), "run: python docs/list_options.py"
