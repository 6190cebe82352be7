"""The steps of the image without Docker: the same programs, user and read-only files.

Because a Docker daemon may be unavailable, the steps of the Dockerfile run in a virtual environment.
"""

import itertools
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attnlens_client import Client
from attnlens_server import ServerConfig
from installed.dockerfile import stages
from installed.environment import ROOT, Environment, serving

pytestmark = pytest.mark.timeout(600)

BUILD, IMAGE = stages(ROOT / "Dockerfile")
# Like a container with --read-only: no writable paths, not even /tmp, and no root privileges.
SANDBOX = """
set -e
mount --rbind / "$1"
mount -o remount,ro,bind "$1"
mount -o remount,ro,bind /tmp "$1/tmp" 2>/dev/null || true
shift_to=$1; shift
exec chroot "$shift_to" setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs "$@"
"""


def test_build_steps_install_the_extra_with_pinned_versions() -> None:
    [venv, install] = BUILD.run
    assert venv == "python -m venv /opt/attnlens"
    assert install.endswith('/opt/attnlens/bin/pip install ".[http,${EXTRA}]"')
    assert BUILD.args == {"EXTRA": "server"}
    assert BUILD.env == {"PIP_CONSTRAINT": "/source/constraints.txt"}


def test_image_settings_match_the_server_options() -> None:
    assert int(IMAGE.expose) == ServerConfig(bundle=Path()).port
    settings = {name for name in IMAGE.env if name.startswith("ATTNLENS_SERVE_")}
    fields = {f"ATTNLENS_SERVE_{name.upper()}" for name in ServerConfig.__dataclass_fields__}
    hosts = {name for name in fields if name.endswith("_HOST")}
    assert settings == hosts  # so that each port can be published
    assert {IMAGE.env[name] for name in hosts} == {"0.0.0.0"}
    assert IMAGE.entrypoint + IMAGE.command == ["attnlens", "serve", "/bundle"]


def test_compose_mounts_the_bundle_at_the_expected_path() -> None:
    [service] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"].values()
    assert service["read_only"] is True
    [mount] = service["volumes"]
    assert mount.split(":")[1:] == [IMAGE.command[-1], "ro"]
    [port] = service["ports"]
    assert port.endswith(f":{IMAGE.expose}")
    assert int(service["stop_grace_period"].removesuffix("s")) > ServerConfig(bundle=Path()).drain_timeout_s


COMPOSE = (ROOT / "compose.yaml").read_text("utf-8")
PAGE = (ROOT / "docs" / "containers.md").read_text("utf-8")


def of_compose(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the published ports of a file for Compose."""
    [service] = yaml.safe_load(text)["services"].values()
    return service["environment"], service["ports"]


def of_docker(heading: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the published ports of the `docker run` line below a heading of the page."""
    line = PAGE.partition(heading)[2].partition("docker run ")[2].partition("\n\n")[0]
    words = line.replace("\\\n", " ").split()
    given = list(itertools.pairwise(words))
    variables = dict(value.split("=") for option, value in given if option == "--env")
    return variables, [value for option, value in given if option == "--publish"]


FORMS = {
    "Compose": of_compose(COMPOSE),
    "Compose with HTTP and metrics": of_compose(re.sub(r"# (- \"|ATTNLENS_)", r"\1", COMPOSE)),
    "Docker": of_docker("\n## Docker\n"),
    "Docker with HTTP and metrics": of_docker("\n### HTTP and metrics\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_published_ports_can_be_reached(form: str, minilm_bundle: Path, tmp_path: Path) -> None:
    variables, published = FORMS[form]
    chosen = {name: value for name, value in variables.items() if name.endswith("_PORT")}
    assert len(chosen) == (2 if "HTTP" in form else 0)
    assert {port.rpartition(":")[2] for port in published} == {IMAGE.expose, *chosen.values()}
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in published)
    env = os.environ | IMAGE.env | variables | dict.fromkeys(chosen, "0") | {"PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "attnlens_cli.main", "serve", str(minilm_bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as server:
        try:
            assert server.stdout is not None
            for _ in range(1 + len(chosen)):
                [(host, port)] = re.findall(r"at (?:http://)?([\d.]+):(\d+)", server.stdout.readline())
                assert host == "0.0.0.0"
                socket.create_connection(("127.0.0.2", int(port)), timeout=20).close()
        finally:
            server.terminate()


def test_server_of_the_image_answers_without_root_and_without_writing(
    server_environment: Environment, minilm_bundle: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(minilm_bundle, tmp_path / "bundle")
    _let_others_read(tmp_path)
    _let_others_read(server_environment.directory)
    if _in_sandbox(["true"], tmp_path) != ["true"]:
        assert _says(["id", "-u"], tmp_path) == (0, f"{IMAGE.user.partition(':')[0]}\n")
        for place in ("/", "/tmp", str(bundle)):
            assert _says(["touch", f"{place}/new"], tmp_path)[0] != 0
    command = [server_environment.program("attnlens"), *IMAGE.command[:-1], str(bundle), "--port", "0"]
    env = {**IMAGE.env, "PATH": os.environ["PATH"]}
    with serving(_in_sandbox(command, tmp_path), tmp_path, env) as address:
        port = address.rpartition(":")[2]
        assert address.startswith("0.0.0.0:")
        with Client(f"127.0.0.1:{port}") as client:
            assert client.embed(["It rained."]).shape == (1, 384)
        health = [server_environment.program("attnlens"), *IMAGE.health_command[1:]]
        healthy = {**env, "ATTNLENS_ADDRESS": f"127.0.0.1:{port}"}
        assert subprocess.run(_in_sandbox(health, tmp_path), env=healthy, check=False).returncode == 0
    assert subprocess.run(_in_sandbox(health, tmp_path), env=healthy, check=False).returncode == 1


def _let_others_read(directory: Path) -> None:
    """Make pytest's private temporary directories readable, from `directory` upward."""
    for each in (directory, *directory.parents):
        status = each.stat()
        is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
        if is_private and not Path.home().is_relative_to(each):
            each.chmod(0o755)


def _in_sandbox(command: list[str], directory: Path) -> list[str]:
    """Wrap a command to run as the image's user with read-only files, if this process has the privileges."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        return command
    root = directory / "root"
    root.mkdir(exist_ok=True)
    uid, _, gid = IMAGE.user.partition(":")
    return ["unshare", "-m", "bash", "-c", SANDBOX.format(uid=uid, gid=gid), "sandbox", str(root), *command]


def _says(command: list[str], directory: Path) -> tuple[int, str]:
    ended = subprocess.run(_in_sandbox(command, directory), check=False, capture_output=True, text=True)
    return ended.returncode, ended.stdout
