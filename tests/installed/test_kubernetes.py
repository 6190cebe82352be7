"""The Kubernetes manifests, checked with strict schemas and compared with the server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from attnlens_server import ServerConfig
from attnlens_server.access.keys import read_keys
from attnlens_server.grpc_api.methods import SERVICE_NAME
from installed.dockerfile import stages
from installed.environment import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = FOLDER / "kustomization.yaml"
CUSTOM = [FOLDER / "servicemonitor.yaml"]  # kinds that Kubernetes does not define
BASE = sorted(path for path in FOLDER.glob("*.yaml") if path != KUSTOMIZATION)
MANIFESTS = [path for path in [*BASE, FOLDER / "examples" / "secret.yaml"] if path not in CUSTOM]
OLDEST, NEWEST = "1.30", "1.37"  # preStop.sleep exists since 1.30
_, IMAGE = stages(ROOT / "Dockerfile")
CONFIG = ServerConfig(bundle=Path())


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
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
    mounts = {mount["name"]: mount for mount in CONTAINER["volumeMounts"]}
    assert all(mount["readOnly"] for mount in mounts.values())
    assert mounts["bundle"]["mountPath"] == IMAGE.command[-1]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    claim = load("persistentvolumeclaim.yaml")["metadata"]["name"]
    assert volumes["bundle"]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}


def test_clients_need_keys_from_the_secret_of_the_example(tmp_path: Path) -> None:
    secret = load("examples/secret.yaml")
    [keys] = [volume["secret"] for volume in POD["volumes"] if volume["name"] == "keys"]
    [mount] = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "keys"]
    assert keys["secretName"] == secret["metadata"]["name"]
    path = Path(VARIABLES["ATTNLENS_SERVE_API_KEYS"])
    assert str(path.parent) == mount["mountPath"]
    assert path.name in secret["stringData"]
    (tmp_path / path.name).write_text(secret["stringData"][path.name])
    assert list(read_keys(tmp_path / path.name).digests_by_name()) == ["search"]


def test_kustomization_lists_every_manifest() -> None:
    assert load("kustomization.yaml")["resources"] == [path.name for path in BASE]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests that `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(result.stdout))


def test_kubectl_builds_the_base() -> None:
    built = {manifest["kind"]: manifest for manifest in kustomized(FOLDER)}
    assert built == {manifest["kind"]: manifest for manifest in map(load, (path.name for path in BASE))}


def test_patch_replaces_the_claim_by_an_image(tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_bytes((FOLDER / "examples" / "image-volume.yaml").read_bytes())
    shutil.copytree(FOLDER, tmp_path / "base")
    kustomization = {"resources": ["base"], "patches": [{"path": "patch.yaml"}]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    [patched] = [manifest for manifest in kustomized(tmp_path) if manifest["kind"] == "Deployment"]
    kubernetes_validate.validate(patched, NEWEST, strict=True)
    volumes = {volume.pop("name"): list(volume) for volume in patched["spec"]["template"]["spec"]["volumes"]}
    assert volumes == {"bundle": ["image"], "keys": ["secret"]}


def closed(required: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": required,
        "required": list(required),
        "additionalProperties": False,
    }


STRING = {"type": "string"}
STRINGS = {"type": "object", "additionalProperties": STRING}
# Fields in our manifests, according to the references of Prometheus Operator, KServe and prometheus-adapter.
METADATA = {"type": "object"}
SERVICE_MONITOR = closed(
    {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": METADATA,
        "spec": closed(
            {
                "jobLabel": STRING,
                "selector": closed({"matchLabels": STRINGS}),
                "endpoints": {
                    "type": "array",
                    "items": closed({"port": STRING, "path": STRING, "interval": STRING}),
                },
            }
        ),
    }
)
INFERENCE_SERVICE = closed(
    {
        "apiVersion": {"const": "serving.kserve.io/v1beta1"},
        "kind": {"const": "InferenceService"},
        "metadata": METADATA,
        "spec": closed({"predictor": {"type": "object"}}),
    }
)
RESOURCE = closed({"resource": STRING})
ADAPTER_RULE = closed(
    {
        "seriesQuery": STRING,
        "resources": closed({"overrides": closed({"namespace": RESOURCE, "pod": RESOURCE})}),
        "name": closed({"as": STRING}),
        "metricsQuery": STRING,
    }
)


def test_monitor_scrapes_the_metrics_as_the_job_of_the_rules() -> None:
    monitor, service = load("servicemonitor.yaml"), load("service.yaml")
    jsonschema.validate(monitor, SERVICE_MONITOR)
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    configuration = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text("utf-8"))
    [job] = [scraped["job_name"] for scraped in configuration["scrape_configs"]]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == job


def test_autoscaler_uses_the_metric_of_the_adapter_and_of_the_server() -> None:
    scaler = load("horizontalpodautoscaler.yaml")["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])
    assert "replicas" not in DEPLOYMENT["spec"]  # `kubectl apply` would undo the work of the autoscaler
    minimum = load("poddisruptionbudget.yaml")["spec"]["minAvailable"]
    assert scaler["minReplicas"] > minimum
    [metric] = [metric["pods"]["metric"]["name"] for metric in scaler["metrics"]]
    [rule] = load("examples/prometheus-adapter.yaml")["rules"]["custom"]
    jsonschema.validate(rule, ADAPTER_RULE)
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"].startswith(f'{metric}{{job="attnlens"')
    dashboard = (ROOT / "deploy" / "grafana" / "attnlens.json").read_text("utf-8")
    assert metric in dashboard  # whose metrics are compared with those of a server


def test_predictor_of_kserve_is_the_container_of_the_deployment() -> None:
    service = load("examples/inferenceservice.yaml")
    jsonschema.validate(service, INFERENCE_SERVICE)
    predictor = service["spec"]["predictor"]
    assert predictor.pop("minReplicas") <= predictor.pop("maxReplicas")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "predictor"}, "spec": predictor}
    kubernetes_validate.validate(pod, NEWEST, strict=True)
    [container] = predictor["containers"]
    assert container["name"] == "kserve-container"
    assert container["ports"] == [{"name": "h2c", "containerPort": CONFIG.port, "protocol": "TCP"}]
    for field in ("image", "readinessProbe", "resources", "securityContext", "volumeMounts"):
        same = CONTAINER[field]["grpc"] if field == "readinessProbe" else CONTAINER[field]
        assert (container[field]["grpc"] if field == "readinessProbe" else container[field]) == same
    assert predictor["volumes"] == POD["volumes"]
    assert predictor["securityContext"] == POD["securityContext"]


def test_variables_are_options_and_set_the_ports() -> None:
    fields = {f"ATTNLENS_SERVE_{name.upper()}" for name in ServerConfig.__dataclass_fields__}
    assert set(VARIABLES) <= fields
    assert PORTS["grpc"] == CONFIG.port
    assert PORTS["http"] == int(VARIABLES["ATTNLENS_SERVE_HTTP_PORT"])
    assert PORTS["metrics"] == int(VARIABLES["ATTNLENS_SERVE_METRICS_PORT"])
    set_by_image = IMAGE.env | VARIABLES
    for name in ("HOST", "HTTP_HOST", "METRICS_HOST"):  # probes and clients come from other machines
        assert set_by_image[f"ATTNLENS_SERVE_{name}"] == "0.0.0.0"


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
    assert DEPLOYMENT["metadata"]["labels"] == load("service.yaml")["metadata"]["labels"] == labels
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
