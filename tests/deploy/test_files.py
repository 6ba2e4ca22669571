"""The files under deploy/: as far as a machine without Docker and Kubernetes can tell.

Tools that are not installed skip their test; `make ray` installs them all.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4.server.metrics import Metrics
from dsv4.server.options import ServerOptions
from dsv4.server.worker.link import EngineLink

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "deploy"
MANIFESTS = sorted((FILES / "kubernetes").glob("*.yaml"))


def objects(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def exposed() -> set[str]:
    """Names of all samples that a server exposes."""
    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    pages = {f"pages_{kind}": {"csa": 1} for kind in ("total", "used", "cached")}
    numbers = ("running", "waiting", "preemptions", "surprises", "prefix_asked", "prefix_hit")
    link.stats = {
        **pages,
        **{f"num_{name}": 0 for name in (*numbers, "steps")},
        "last_step_s": 0.0,
        "step_sizes": {"bounds": [1], "counts": [0, 0], "num_tokens": 0},
    }
    metrics = Metrics("tiny", link)
    metrics.count_rejected(429)
    text = metrics.text().decode()
    names = set(re.findall(r"^(dsv4:\w+)", text, re.M))
    return names | set(re.findall(r"^# TYPE (dsv4:\w+) counter", text, re.M))


def queries() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query with Grafana's variables filled in."""
    board = json.loads((FILES / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            yield panel["title"], query
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_every_metric_of_the_queries_exists() -> None:
    known = exposed()
    found = {(place, name) for place, query in queries() for name in re.findall(r"dsv4:\w+", query)}
    assert len(found) > 30
    assert not {(place, name) for place, name in found if name not in known}


def test_the_queries_parse() -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for place, query in queries():
        parser.parse(query)
        assert "$" not in query, place
    with pytest.raises(ValueError, match="unexpected end"):
        parser.parse("rate(dsv4:x[")


def test_panels_do_not_overlap() -> None:
    board = json.loads((FILES / "grafana.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_scrape_example() -> None:
    found = yaml.safe_load((FILES / "prometheus.yaml").read_text())
    assert [job["job_name"] for job in found["scrape_configs"]] == ["dsv4", "ray"]
    assert all((FILES / name).is_file() for name in found["rule_files"])


def pod_specs() -> Iterator[tuple[str, Any]]:
    """All pods that the manifests describe."""
    for path in MANIFESTS:
        for item in objects(path):
            if item["kind"] == "Deployment":
                yield path.name, item["spec"]["template"]
            elif item["kind"] == "RayService":
                cluster = item["spec"]["rayClusterConfig"]
                for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                    yield path.name, group["template"]


def test_pods_are_restricted() -> None:
    pods = list(pod_specs())
    assert len(pods) == 3
    for name, pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert "memory" in container["resources"]["limits"]
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts["models"]["readOnly"] is True
            assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}


def test_time_to_drain() -> None:
    """A pod, a container and a unit wait longer than the server drains."""
    [deployment] = [x for x in objects(MANIFESTS[0]) if x["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    [drain] = re.findall(r"--drain-seconds=(\d+)", " ".join(spec["containers"][0]["args"]))
    assert spec["terminationGracePeriodSeconds"] > int(drain)
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    command = compose["x-dsv4"]["command"]
    drain = command[command.index("--drain-seconds") + 1]
    assert int(compose["x-dsv4"]["stop_grace_period"].rstrip("s")) > int(drain)
    unit = (FILES / "dsv4.service").read_text()
    [drain] = re.findall(r"--drain-seconds (\d+)", unit)
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(stop) > int(drain)


def commands() -> Iterator[list[str]]:
    """Arguments of `dsv4` in all files."""
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    yield [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in compose["x-dsv4"]["command"]]
    for _, pod in pod_specs():
        for container in pod["spec"]["containers"]:
            if "args" in container:
                yield container["args"]
    unit = (FILES / "dsv4.service").read_text()
    [line] = re.findall(r"^ExecStart=\S+ (.*) \$OPTIONS$", unit, re.M)
    yield line.split()
    [words] = re.findall(r"^CMD (\[.*\])$", (FILES / "Dockerfile").read_text(), re.M)
    yield json.loads(words)


def test_commands_have_options_that_exist() -> None:
    found = list(commands())
    assert len(found) == 4
    page = (ROOT / "docs" / "commands.md").read_text()
    known = set(re.findall(r"`(--[a-z-]+)", page[page.index("## dsv4 serve") :]))
    for words in found:
        assert words[0] == "serve"
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_probes_ask_paths_that_exist() -> None:
    from dsv4.server.app import create_app
    from dsv4.server.service import Service

    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    paths = set(create_app(Service("tiny", ServerOptions(), link)).openapi()["paths"])
    asked = {
        probe["httpGet"]["path"]
        for _, pod in pod_specs()
        for container in pod["spec"]["containers"]
        for probe in (
            container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")
        )
        if probe
    }
    assert asked == {"/health", "/ready", "/version"}
    assert asked <= paths


def test_manifests_follow_the_schemas() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    checked = []
    for path in MANIFESTS:
        for item in objects(path):
            if "ray.io" not in item["apiVersion"]:
                validate.validate(item, "1.34", strict=True)
                checked.append(item["kind"])
    for _, pod in pod_specs():  # of RayServices, too: their own schema is in no package
        item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        validate.validate(item, "1.34", strict=True)
    assert checked == ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"]


def test_the_serve_config_is_one() -> None:
    pytest.importorskip("ray", reason="dsv4[ray] is not installed")
    from ray.serve.schema import ServeDeploySchema

    from dsv4.deploy import ray as deploy

    [service] = objects(FILES / "kubernetes" / "rayservice.yaml")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "dsv4.deploy.ray:app"
    deploy.app(application.args)
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == application.args["tp"]
    assert workers["replicas"] == application.args["replicas"]


def test_compose() -> None:
    spec = pytest.importorskip("compose_spec", reason="compose-spec is not installed")
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (FILES / "compose.yaml").read_text())
    found = spec.PyCompose.from_json(json.dumps(yaml.safe_load(text)))  # it reads no anchors
    assert sorted(found.service_names()) == ["cpu", "gpu", "prometheus"]


def test_the_dockerfile() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    tool = str(beside) if beside.is_file() else shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed")
    found = subprocess.run(
        [tool, str(FILES / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_runs_as_nobody_important() -> None:
    text = (FILES / "Dockerfile").read_text()
    assert text.index("\nUSER 10001:10001\n") < text.index("\nENTRYPOINT")
    copied = re.findall(r"^COPY (.*) \S+$", text, re.M)
    ignored = (ROOT / ".dockerignore").read_text()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert f"!{name}\n" in ignored


def test_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (FILES / "dsv4.service").read_text()
    path = tmp_path / "dsv4.service"
    path.write_text(unit.replace("/opt/dsv4/bin/dsv4", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in found.stderr.splitlines() if "dsv4" in line]
    assert (found.returncode, said) == (0, [])
