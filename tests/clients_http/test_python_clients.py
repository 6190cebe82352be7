"""Python packages that call the HTTP APIs get the vectors of gRPC, and raise errors of their own.

The checks are the functions of `with_*.py`. They run in the environment of tests/integrations, in one
process for each major version of openai, because importing the packages takes most of the time.
"""

import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Minutes on a busy machine.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".integrations"
NEED_OPENAI_2 = ["with_litellm"]
MODULES = sorted(path.stem for path in HERE.glob("with_*.py"))
RUNS = {
    "openai3": [module for module in MODULES if module not in NEED_OPENAI_2],
    "openai2": ["with_openai", *NEED_OPENAI_2],
}
CHECKS = [
    (run, f"{module}::{name}")
    for run, modules in RUNS.items()
    for module in modules
    for name in re.findall(r"^def (check_\w+)", (HERE / f"{module}.py").read_text("utf-8"), re.MULTILINE)
]

Results = dict[str, str | None]


@pytest.fixture(scope="module")
def results_of(server_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Return a function that runs the checks of a process, and returns their tracebacks."""

    @cache
    def run(name: str) -> Results:
        if not (ENVIRONMENT / "openai2").exists():
            pytest.fail("the environment of the clients is missing: make test-clients")
        directory = tmp_path_factory.mktemp(name)
        paths = [HERE.parent, *([ENVIRONMENT / "openai2"] if name == "openai2" else [])]
        # No credentials, proxies or caches of the machine, no telemetry, no list of prices from the network.
        environment = {"HOME": str(directory), "PYTHONPATH": ":".join(map(str, paths))}
        environment |= {"ANONYMIZED_TELEMETRY": "False", "HAYSTACK_TELEMETRY_ENABLED": "False"}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command: list[str | Path] = [ENVIRONMENT / "bin" / "python", "-m", "clients_http.runner", server_file]
        command += [directory / "results.json", *RUNS[name]]
        log = directory / "log.txt"
        with log.open("w") as output:
            process = subprocess.run(command, env=environment, stderr=output, timeout=500, check=False)
        assert process.returncode == 0, log.read_text("utf-8")
        results: Results = json.loads((directory / "results.json").read_text("utf-8"))
        return results

    return run


@pytest.mark.parametrize(("run", "check"), CHECKS)
def test_client(run: str, check: str, results_of: Callable[[str], Results]) -> None:
    if problem := results_of(run)[check]:
        pytest.fail(problem, pytrace=False)
