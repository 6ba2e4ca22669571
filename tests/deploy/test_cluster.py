"""A cluster that others started: a node without the model, a new version while a stream runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="dsv4[ray] is not installed")

from dsv4.util.models import model_folder
from tests.deploy.test_ray import outcome, replicas, running_streams, wait_for_replicas
from tests.server.support import ROOT, Server, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

# An operator's own driver: the same application with another number of places
NEW_VERSION = """
import ray
from ray import serve
from dsv4.deploy import ray as deploy
ray.init()
arguments = {"model": "tiny", "device": "cpu", "replicas": 2, "replica_cpus": "0.1",
             "max_sequences": "7", "health_seconds": 1, "drain_seconds": 60}
serve.run(deploy.app(arguments), name=deploy.NAME, route_prefix="/")
"""


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    """Two home folders; the first has the model."""
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    one.mkdir()
    (one / "model").symlink_to(model_folder("tiny"))
    return one, two


@pytest.fixture
def nodes(homes: tuple[Path, Path]) -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).with_name("two_nodes.py")
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, homes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # both nodes would look for Ray's token in their home folders
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
    )
    yield process
    process.communicate(timeout=60)


def test_a_node_without_the_model(nodes: "subprocess.Popen[str]", homes: tuple[Path, Path]) -> None:
    """The first node is full with one replica; the second replica finds no model on the other."""
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    variables = {
        "RAY_ADDRESS": nodes.stdout.readline().strip(),
        "RAY_AUTH_MODE": "disabled",
        "HOME": str(homes[0]),
    }
    options = ("~/model", "--ray", "--replicas", "2", "--replica-cpus", "0.8", "--device", "cpu")
    server = Server(*options, env=variables).wait()
    try:
        assert server.chat("SAY x").status_code == 200
        nodes.stdin.write("the second node\n")
        nodes.stdin.flush()
        wait_for(lambda: "a replica could not be started" in server.log)
        assert "'~/model' is neither a folder nor an embedded model" in server.log
        assert "node " in server.log
        assert len(replicas(server)) == 1
        assert server.chat("SAY x").status_code == 200
    finally:
        server.stop()


def test_a_new_version_replaces_replicas_one_by_one() -> None:
    """Streams of the old version are finished by it; no request fails in between."""
    options = ("--ray", "--replicas", "2", "--replica-cpus", "0.1", "--drain-seconds", "60")
    server = Server(*options, "--max-sequences", "5", "--device", "cpu").wait()
    try:
        wait_for_replicas(server, 2)
        before = {replica["name"] for replica in replicas(server)}
        streams = running_streams(server, 4, milliseconds=1500)
        deployed = subprocess.run(
            [sys.executable, "-c", NEW_VERSION],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "auto"},
        )
        assert deployed.returncode == 0, deployed.stderr
        assert [outcome(item.result(120)) for item in streams] == ["whole"] * 4
        wait_for(lambda: not before & {replica["name"] for replica in replicas(server)})
        assert server.chat("hello").status_code == 200
    finally:
        server.stop()
