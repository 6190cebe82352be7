"""The Kubernetes manifests, checked with strict schemas and compared with the server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from attnlens_server import ServerConfig
from attnlens_server.grpc_api.methods import SERVICE_NAME
from installed.dockerfile import stages
from installed.environment import ROOT

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.30", "1.37"  # preStop.sleep exists since 1.30
_, IMAGE = stages(ROOT / "Dockerfile")
CONFIG = ServerConfig(bundle=Path())


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "kubernetes" / name).read_text("utf-8"))
    return loaded


DEPLOYMENT = load("deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
VARIABLES = {each["name"]: each["value"] for each in CONTAINER["env"]}
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("path", MANIFESTS, ids=[path.stem for path in MANIFESTS])
def test_manifest_matches_the_schema_of_kubernetes(path: Path, version: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text("utf-8")), version, strict=True)


def test_schema_rejects_a_misspelt_field() -> None:
    deployment = load("deployment.yaml")
    deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_probes_ask_the_health_services_of_the_server() -> None:
    assert CONTAINER["startupProbe"]["grpc"] == {"port": CONFIG.port}
    assert CONTAINER["readinessProbe"]["grpc"] == {"port": CONFIG.port, "service": SERVICE_NAME}
    assert CONTAINER["livenessProbe"]["grpc"] == {"port": CONFIG.port}


def test_pod_may_drain_before_it_is_killed() -> None:
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > pause + CONFIG.drain_timeout_s


def test_pod_runs_as_the_user_of_the_image_without_privileges() -> None:
    user, _, group = IMAGE.user.partition(":")
    context = POD["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
    assert context["runAsNonRoot"] is True
    assert CONTAINER["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    [mount] = CONTAINER["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == (IMAGE.command[-1], True)


def test_variables_are_options_and_set_the_ports() -> None:
    fields = {f"ATTNLENS_SERVE_{name.upper()}" for name in ServerConfig.__dataclass_fields__}
    assert set(VARIABLES) <= fields
    assert PORTS["grpc"] == CONFIG.port
    assert PORTS["http"] == int(VARIABLES["ATTNLENS_SERVE_HTTP_PORT"])
    assert PORTS["metrics"] == int(VARIABLES["ATTNLENS_SERVE_METRICS_PORT"])


def test_memory_of_the_container_is_a_tenth_above_that_of_the_server() -> None:
    limit = CONTAINER["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) << 30 >= 1.1 * int(VARIABLES["ATTNLENS_SERVE_MAX_MEMORY_BYTES"])


def test_service_policy_and_budget_select_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert load("service.yaml")["spec"]["selector"] == labels
    assert load("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert load("poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"] == labels
    for port in load("service.yaml")["spec"]["ports"]:
        assert port["port"] == PORTS[port["targetPort"]]
    used = [port["port"] for rule in load("networkpolicy.yaml")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(used) == sorted(PORTS)


COUNT = "from loky import cpu_count; print(cpu_count(only_physical_cores=True))"
IN_CONTAINER = """
set -e
mount -t tmpfs none /sys/fs/cgroup
echo "$1 100000" > /sys/fs/cgroup/cpu.max
shift; exec "$@"
"""


@pytest.mark.parametrize(("quota", "expected"), [("100000", 1), ("50000", 1), ("max", None)])
def test_number_of_cpus_is_the_limit_of_the_container(quota: str, expected: int | None) -> None:
    """With cgroup v2, the limit of a container is in the root of its own cgroup file system."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    command = [sys.executable, "-c", COUNT]
    limited = ["unshare", "-m", "bash", "-c", IN_CONTAINER, "container", quota, *command]
    outputs = [
        subprocess.run(each, check=True, capture_output=True, text=True).stdout for each in (command, limited)
    ]
    counted = [int(output) for output in outputs]
    assert counted[1] == (counted[0] if expected is None else expected)
