"""Prometheus rules and the Grafana dashboard, with a Prometheus that scrapes a server."""

import functools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import grpc
import pytest
import trustme
import yaml

from attnlens_client import AttnlensError, Client
from served import ServerProcess

needs_prometheus = [
    pytest.mark.extended,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus is not installed: run make prometheus"
    ),
]


def with_prometheus(test: Any) -> Any:
    """Mark a test that needs Prometheus."""
    return functools.reduce(lambda marked, mark: mark(marked), needs_prometheus, test)


DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "attnlens.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
PANEL_EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
EXPRESSIONS = [*PANEL_EXPRESSIONS.values(), *(rule["expr"] for rule in ALERTS)]
LIMIT = ("--max-memory-bytes", str(4 << 30))
NAME = re.compile(r"\b(?:attnlens|process)_\w+|\bup\b")
STRING = re.compile(r'"[^"]*"')


def promtool(*arguments: str | Path) -> str:
    result = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, cwd=RULES.parent
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Prometheus:
    """A Prometheus process."""

    def __init__(self, directory: Path, target: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = "{}:{}".format(*probe.getsockname())
        self.url = f"http://{address}/api/v1"
        configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        configuration["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
        configuration["rule_files"] = [str(RULES)]
        configuration["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        file = directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(configuration))
        options = {
            "config.file": file,
            "storage.tsdb.path": directory / "data",
            "web.listen-address": address,
            "log.level": "error",
        }
        command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        self.process = subprocess.Popen(command)

    def get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self.url}/{path}?{urlencode(parameters)}") as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.get("query", query=expression)["result"]
        return result

    def wait_for(self, expression: str) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                if self.query(expression):
                    return
            except OSError:  # not listening yet
                assert self.process.poll() is None
            assert time.monotonic() < until, expression
            time.sleep(0.1)


@pytest.fixture(scope="module")
def scraped(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Return a Prometheus that has scraped a server with a certificate and a little load."""
    directory = tmp_path_factory.mktemp("prometheus")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    key, chain = directory / "key.pem", directory / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    certificate.cert_chain_pems[0].write_to_path(chain)
    tls = ("--tls-cert", str(chain), "--tls-key", str(key))
    with ServerProcess(minilm_bundle, "--http-port", "0", "--metrics-port", "0", *LIMIT, *tls) as server:
        server.http_url()
        assert server.process.stdout is not None
        target = server.process.stdout.readline().partition("//")[2].partition("/")[0]
        prometheus = Prometheus(directory, target)
        try:
            prometheus.wait_for("up == 1")
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            address = server.address.replace("127.0.0.1", "localhost")
            with Client(address, credentials=credentials) as client:
                client.embed(["It rained.", "It was wet."] * 20)
                with pytest.raises(AttnlensError):
                    client.embed(["word " * 400])
                prometheus.wait_for('attnlens_requests_total{method="Embed", status="OK"}')
                client.embed(["It rained."])
            prometheus.wait_for('increase(attnlens_requests_total{method="Embed", status="OK"}[1m]) > 0')
            yield prometheus
        finally:
            prometheus.process.terminate()
            prometheus.process.wait(30)


def filled(expression: str) -> str:
    """Replace the variables of Grafana."""
    for name, value in (("$__rate_interval", "1m"), ("$instance", ".*"), ("$job", "attnlens")):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@with_prometheus
def test_rules_are_valid_and_fire_when_they_should() -> None:
    promtool("check", "config", "prometheus.yaml")
    assert "SUCCESS: 12 rules found" in promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "rules_test.yaml")
    tested = set(re.findall(r"alertname: (\w+)", (RULES.parent / "rules_test.yaml").read_text()))
    assert tested == {rule["alert"] for rule in ALERTS}


@with_prometheus
def test_metrics_follow_the_conventions_of_prometheus(scraped: Prometheus) -> None:
    [target] = scraped.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    with urlopen(target["scrapeUrl"]) as response:
        result = subprocess.run(
            ["promtool", "check", "metrics"], input=response.read(), capture_output=True, check=False
        )
    problems = [line for line in result.stderr.decode().splitlines() if not line.startswith("process_")]
    assert problems == []


@with_prometheus
def test_all_series_of_rules_and_dashboard_exist(scraped: Prometheus) -> None:
    names = {name for text in EXPRESSIONS for name in NAME.findall(STRING.sub("", text))}
    assert len(names) > 30
    missing = {name for name in names if not scraped.query(name)}
    assert missing == set()


@with_prometheus
@pytest.mark.parametrize("title", PANEL_EXPRESSIONS)
def test_panel_shows_something(scraped: Prometheus, title: str) -> None:
    expression = filled(PANEL_EXPRESSIONS[title])
    assert scraped.query(expression), expression


@with_prometheus
def test_series_in_the_tests_of_rules_have_the_labels_of_real_ones(scraped: Prometheus) -> None:
    document = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())
    for text in {series["series"] for test in document["tests"] for series in test["input_series"]}:
        name, _, labels = text.partition("{")
        found = {label for result in scraped.query(name) for label in result["metric"]} - {"__name__"}
        assert set(re.findall(r"(\w+)=", labels)) | {"job"} == found, text


@with_prometheus
def test_prometheus_evaluates_all_rules(scraped: Prometheus) -> None:
    [group] = scraped.get("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(
        (rule["alert"] for rule in ALERTS), "ok"
    )
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()


@with_prometheus
def test_page_lists_all_metrics_and_alerts(scraped: Prometheus) -> None:
    text = (DEPLOY.parent / "docs" / "operations.md").read_text()
    documented = set(re.findall(r"`(attnlens_\w+)`", text))
    scraped_names = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in scraped.get("label/__name__/values")
        if name.startswith("attnlens_")
    }
    assert documented == scraped_names
    assert re.findall(r"^\| `(Attnlens\w+)`", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


def test_dashboard_has_the_structure_of_grafana() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    occupied: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not occupied & cells, panel["title"]
        occupied |= cells
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_each_panel_states_what_it_shows_in_one_unit() -> None:
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert not panel["fieldConfig"]["overrides"], panel["title"]
        units = {unit_of(target["expr"]) for target in panel["targets"]}
        assert len(units) == 1, f"{panel['title']}: {units}"
    assert {panel["title"] for panel in PANELS if "client)" in panel["targets"][0]["expr"]} >= {
        "Mean duration by client", "Mean queue time by client", "Mean compute time by client",
    }  # fmt: skip


def unit_of(expression: str) -> str:
    """Return the unit of a query by the names of its metrics: their nouns, and whether it divides them."""
    names = [re.sub("_(limit|bucket|total|rejected)$", "", name) for name in NAME.findall(expression)]
    kind = re.compile(
        r"(seconds|bytes|tokens|inputs|batches|requests|connections|rejections|fds|worker|clients)"
    )
    nouns = [found[-1] if (found := kind.findall(name)) else name for name in names]
    rate = "rate" if "rate(" in expression else "number"
    if " / " in expression and (len(set(nouns)) == 1 or "compute_seconds" in expression):
        return "ratio"
    if nouns[0] in ("requests", "connections", "rejections") and rate == "rate":
        return "requests per second"
    return f"{nouns[0]} {rate}" if "histogram_quantile" not in expression else "seconds"


def test_missed_deadlines_of_clients_are_not_errors_of_the_server() -> None:
    expressions = {panel["title"]: panel["targets"][0]["expr"] for panel in PANELS}
    expressions |= {rule["alert"]: rule["expr"] for rule in ALERTS}
    for name in ("Server errors", "AttnlensServerErrors"):
        [statuses] = re.findall(r'status=~"([^"]+)"', expressions[name])
        counted = {
            status
            for status in ("INTERNAL", "500", "503", "DEADLINE_EXCEEDED", "504", "429")
            if re.fullmatch(statuses, status)
        }
        assert counted == {"INTERNAL", "500", "503"}
