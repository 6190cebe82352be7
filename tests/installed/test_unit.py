"""The systemd unit: checked with `systemd-analyze`, and its command started with its variables."""

import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path

import grpc
import pytest
import trustme

from attnlens_client import Client, UnauthenticatedError
from attnlens_server import ServerConfig
from attnlens_server.access.keys import new_key
from installed.environment import ROOT

UNIT = ROOT / "deploy" / "attnlens@.service"
DROP_IN = ROOT / "deploy" / "credentials.conf"
PAGE = ROOT / "docs" / "systemd.md"


def settings(*paths: Path) -> dict[str, list[str]]:
    """Return the values of each setting of unit files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for name, value in re.findall(r"^(\w+)=(.*)$", path.read_text("utf-8"), re.MULTILINE):
            found[name].append(value)
    return found


def variables(lines: list[str]) -> dict[str, str]:
    """Return the variables of lines such as `A=1 B=2`."""
    return dict(each.split("=", 1) for line in lines for each in line.split())


def test_private_files_are_credentials() -> None:
    """A user that systemd creates at the start cannot read files with mode 600, whoever owns them."""
    assert settings(UNIT)["DynamicUser"] == ["yes"]
    assert not [name for name in variables(settings(UNIT)["Environment"]) if name.startswith("ATTNLENS_")]
    loaded = dict(each.split(":") for each in settings(DROP_IN)["LoadCredential"])
    used = variables(settings(DROP_IN)["Environment"])
    assert sorted(used.values()) == sorted(f"%d/{name}" for name in loaded)
    assert all(path.startswith("/etc/attnlens/%i/") for path in loaded.values())
    page = PAGE.read_text("utf-8")
    assert all(path.replace("%i", "minilm").rpartition("/")[2] in page for path in loaded.values())


def test_command_of_the_unit_serves_with_the_files_and_variables_of_the_page(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    key, line = new_key("search")
    (tmp_path / "keys.txt").write_text(line)
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("keys.txt", "server.key", "server.pem"):
        (tmp_path / name).chmod(0o400)
    env = variables(settings(UNIT, DROP_IN)["Environment"])
    env |= dict(re.findall(r"^    (ATTNLENS_SERVE_\w+)=(\S+)$", PAGE.read_text("utf-8"), re.MULTILINE))
    env = {name: "0" if name.endswith("_PORT") else value for name, value in env.items()}
    assert sum(name.endswith("_PORT") for name in env) == 3
    env = {name: value.replace("%d", str(tmp_path)) for name, value in env.items()}
    [command] = settings(UNIT)["ExecStart"]
    program, *words = command.split()
    assert program == "/opt/attnlens/bin/attnlens"
    assert words == ["serve", "/srv/attnlens/%i"]
    run = [sys.executable, "-m", "attnlens_cli.main", "serve", str(minilm_bundle)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=os.environ | env) as server:
        try:
            assert server.stdout is not None
            printed = [server.stdout.readline() for _ in range(3)]
            [grpc_port, http_port, metrics_port] = [
                re.findall(r"at (?:https?://)?([\d.]+):(\d+)", line)[0] for line in printed
            ]
            assert [grpc_port[0], http_port[0], metrics_port[0]] == ["0.0.0.0", "0.0.0.0", "127.0.0.1"]
            credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
            with Client(f"localhost:{grpc_port[1]}", credentials=credentials, api_key=key) as client:
                assert client.embed(["It rained."]).shape == (1, 384)
            with (
                Client(f"localhost:{grpc_port[1]}", credentials=credentials) as client,
                pytest.raises(UnauthenticatedError),
            ):
                client.embed(["It rained."])
            trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
            for url, context in (
                (f"https://localhost:{http_port[1]}/readyz", trusting),
                (f"http://127.0.0.1:{metrics_port[1]}/metrics", None),
            ):
                with urllib.request.urlopen(url, context=context, timeout=20) as response:
                    assert response.status == 200
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.mark.parametrize("has_credentials", [False, True])
def test_systemd_accepts_the_unit_and_rates_its_sandboxing_well(
    tmp_path: Path, has_credentials: bool
) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "attnlens@minilm.service"
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/attnlens/bin/attnlens", "/bin/true"), "utf-8")
    if has_credentials:
        folder = tmp_path / f"{unit.name}.d"
        folder.mkdir()
        shutil.copy(DROP_IN, folder)
    verified = subprocess.run([program, "verify", unit], check=False, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = [program, "security", "--offline=yes", "--threshold=20", str(unit)]
    confined = subprocess.run(command, check=False, capture_output=True, text=True)
    assert confined.returncode == 0, confined.stdout


def test_unit_waits_longer_than_the_server_drains() -> None:
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert int(seconds) > ServerConfig(bundle=Path()).drain_timeout_s
