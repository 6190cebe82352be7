"""The systemd unit, checked with `systemd-analyze`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attnlens_server import ServerConfig
from installed.environment import ROOT

UNIT = ROOT / "deploy" / "attnlens@.service"


def test_systemd_accepts_the_unit_and_rates_its_sandboxing_well(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "attnlens@minilm.service"
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/attnlens/bin/attnlens", "/bin/true"), "utf-8")
    verified = subprocess.run([program, "verify", unit], check=False, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = [program, "security", "--offline=yes", "--threshold=20", str(unit)]
    confined = subprocess.run(command, check=False, capture_output=True, text=True)
    assert confined.returncode == 0, confined.stdout


def test_unit_waits_longer_than_the_server_drains() -> None:
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert int(seconds) > ServerConfig(bundle=Path()).drain_timeout_s
