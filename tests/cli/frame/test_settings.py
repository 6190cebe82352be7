"""Options from environment variables, per command or shared by all commands that call a server."""

from collections.abc import Callable

import pytest

from scripted import ScriptedServer

RunHere = Callable[..., tuple[int, str, str]]

# Shorter than the first retry backoff, which would take seconds.
NOWHERE = {"ATTNLENS_ADDRESS": "127.0.0.1:1", "ATTNLENS_TIMEOUT_S": "0.1"}
ASKING = {
    "attend": ("attend", "abc"),
    "compare": ("compare", "a", "b"),
    "explain": ("explain", "abc"),
    "info": ("info",),
    "view": ("view", "abc", "-o", "x.html"),
}


@pytest.mark.parametrize("args", ASKING.values(), ids=ASKING)
def test_one_variable_names_the_server_for_every_command(run_here: RunHere, args: tuple[str, ...]) -> None:
    code, out, err = run_here(*args, env=NOWHERE)
    assert (code, out) == (1, "")
    assert err.startswith(f"attnlens {args[0]}: no server reachable at 127.0.0.1:1 for 0.1 s: ")


def test_command_line_overrides_variable_overrides_shared_variable_overrides_file(
    run_here: RunHere, server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("file") / "attnlens.toml"
    file.write_text('[info]\naddress = "127.0.0.1:4"\ntimeout-s = 0.1\n')
    shared = {"ATTNLENS_ADDRESS": "127.0.0.1:3"}
    own = {"ATTNLENS_INFO_ADDRESS": "127.0.0.1:2"}
    args = ("--config-file", file, "info")
    assert " at 127.0.0.1:4 for 0.1 s: " in run_here(*args)[2]
    assert " at 127.0.0.1:3 for 0.1 s: " in run_here(*args, env=shared)[2]
    assert " at 127.0.0.1:2 for 0.1 s: " in run_here(*args, env=shared | own)[2]
    assert " at 127.0.0.1:4 for 0.1 s: " in run_here(*args, env={"ATTNLENS_ADDRESS": ""})[2]
    assert run_here(*args, "--address", server.address, "--timeout-s", "60", env=shared | own)[0] == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ATTNLENS_TIMEOUT_S", "soon", "invalid value for '--timeout-s': 'soon' is not a valid float"),
        ("ATTNLENS_INFO_TIMEOUT_S", "0", "invalid value for '--timeout-s': 0.0 is not in the range"),
        ("ATTNLENS_ADDRESS", "localhost", "invalid value for '--address': address is 'localhost': use"),
        ("ATTNLENS_TLS_CA", __file__, f"invalid value for '--tls-ca': {__file__} is not a PEM file"),
        ("ATTNLENS_LOG_LEVEL", "loud", "invalid value for '--log-level': 'loud' is not one of"),
    ],
)
def test_invalid_value_is_reported_with_its_variable(
    run_here: RunHere, name: str, value: str, message: str
) -> None:
    code, out, err = run_here("info", env={name: value})
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert err.endswith(f" (from the variable {name})\n")


def test_invalid_value_on_the_command_line_is_reported_without_a_variable(run_here: RunHere) -> None:
    assert "variable" not in run_here("info", "--timeout-s", "x", env={"ATTNLENS_TIMEOUT_S": "5"})[2]


def test_other_connection_options_have_shared_variables(run_here: RunHere, server: ScriptedServer) -> None:
    env = {"ATTNLENS_ADDRESS": server.address, "ATTNLENS_MODEL": "scripted"}
    assert run_here("info", env=env)[0] == 0
    assert server.requests[0].model == "scripted"
    code, _, err = run_here("info", env=env | {"ATTNLENS_TLS_SERVER_NAME": "x"})
    assert (code, err) == (2, "attnlens info: --tls-server-name needs TLS: use --tls or --tls-ca\n")


def test_unquoted_text_is_reported_with_a_hint_to_quote_it(run_here: RunHere) -> None:
    for command in ("attend", "explain"):
        code, _, err = run_here(command, "It", "rained")
        assert (code, err) == (
            2,
            f"attnlens {command}: got unexpected extra argument (rained): put quotes around a text\n",
        )
    assert run_here("info", "a")[2] == "attnlens info: got unexpected extra argument (a)\n"


@pytest.mark.parametrize(
    ("args", "name", "right"),
    [
        (("info",), "ATTNLENS_ADRESS", "ATTNLENS_ADDRESS"),
        (("embed", __file__), "ATTNLENS_EMBED_BATCHSIZE", "ATTNLENS_EMBED_BATCH_SIZE"),
        (("serve", "/no/such/Model"), "ATTNLENS_SERVE_MAX_TOKEN", "ATTNLENS_SERVE_MAX_TOKENS"),
        (("list", "/no/such/Model"), "ATTNLENS_LOGLEVEL", "ATTNLENS_LOG_LEVEL"),
    ],
)
def test_unknown_variable_gives_a_warning(
    run_here: RunHere, args: tuple[str, ...], name: str, right: str
) -> None:
    code, out, err = run_here(*args, env=NOWHERE)
    warned_code, warned_out, warned = run_here(*args, env=NOWHERE | {name: "5"})
    assert (warned_code, warned_out) == (code, out)
    assert warned == f"warning: unknown environment variable {name} (did you mean {right}?)\n{err}"


def test_several_unknown_variables_share_one_warning(run_here: RunHere, server: ScriptedServer) -> None:
    env = {"ATTNLENS_ADDRESS": server.address, "ATTNLENS_X\x1b": "", "ATTNLENS_TIMEOUTS": "5"}
    code, _, err = run_here("info", env=env)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("warning: unknown environment variables ATTNLENS_TIMEOUTS (did you mean ATTNLENS_T")
    assert err.endswith("?), ATTNLENS_X\\x1b\n")


def test_variables_of_other_commands_and_of_services_give_no_warning(
    run_here: RunHere, server: ScriptedServer
) -> None:
    env = {
        "ATTNLENS_ADDRESS": server.address,
        "ATTNLENS_CACHE_DIR": "/tmp",
        "ATTNLENS_DEBUG": "0",
        "ATTNLENS_LOG_LEVEL": "error",
        "ATTNLENS_EMBED_BATCH_SIZE": "5",
        "ATTNLENS_INFO_TIMEOUT_S": "5",
        "ATTNLENS_SERVICE_HOST": "10.0.0.1",
        "ATTNLENS_SERVICE_PORT_GRPC": "50051",
        "ATTNLENS_PORT": "tcp://10.0.0.1:50051",
        "ATTNLENS_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert run_here("info", env=env)[::2] == (0, "")


def test_message_keeps_the_capitals_of_a_path(run_here: RunHere) -> None:
    code, _, err = run_here("serve", "Models./no/X")
    assert (code, err.startswith("attnlens serve: Models./no/X does not exist: ")) == (1, True)
