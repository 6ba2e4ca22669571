"""The application from arguments, and figures of several replicas as one. No cluster is started."""

from typing import Any

import pytest

pytest.importorskip("ray", reason="dsv4[ray] is not installed")

from dsv4.deploy import ray as deploy
from dsv4.deploy.ingress import add_stats, merge_metrics
from dsv4.errors import OptionError

pytestmark = pytest.mark.ray


def deployments(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The engine's and the ingress's deployment."""
    ingress = deploy.app(arguments)._bound_deployment
    return ingress.init_args[0]._bound_deployment, ingress


def test_arguments_as_texts_and_as_numbers() -> None:
    texts = {"device": "cpu", "replicas": "1-3", "max_sequences": "4", "max_waiting": "9"}
    engine, _ = deployments({**texts, "prefix_cache": "false"})
    assert engine.init_args[1]["max_sequences"] == 4
    assert engine.init_args[1]["prefix_cache"] is False
    config = engine._deployment_config
    assert (config.max_ongoing_requests, config.max_queued_requests) == (8, 9)
    scale = config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (1, 3, 4)
    engine, ingress = deployments({"device": "cpu", "replicas": 3, "ingress_replicas": 2})
    assert engine.num_replicas == 3
    assert ingress.num_replicas == 2


def test_ranks_of_a_replica_are_placed_together() -> None:
    engine, _ = deployments({"device": "cuda", "tp": 8, "replicas": 2})
    config = engine._replica_config
    assert config.placement_group_bundles == [{"CPU": 8.0, "GPU": 8}]
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.ray_actor_options["num_gpus"] == 8
    single, _ = deployments({"device": "cuda"})  # tp is auto, of which Ray knows nothing
    assert single.init_args[1]["tp"] == 1
    assert single._replica_config.placement_group_bundles is None
    assert single._replica_config.ray_actor_options["num_gpus"] == 1
    on_cpu, _ = deployments({"device": "cpu"})
    assert on_cpu._replica_config.ray_actor_options["num_gpus"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": "cpu", "replica": 3}, "unknown argument 'replica'"),
        ({"device": "cpu", "replicas": "many"}, "LEAST-MOST"),
        ({"device": "cpu", "max_sequences": "four"}, "max_sequences: found 'four'"),
        ({"device": "cuda:1"}, "Ray assigns the GPUs"),
        ({"device": "cuda", "nodes": 2, "head": "a:1"}, "a replica is on one machine"),
        ({"device": "auto"}, "expected cpu or cuda"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        deploy.app(arguments)


def test_statistics_are_added() -> None:
    one = {"num_running": 2, "pages_used": {"csa": 3}, "last_step_s": 0.1, "step_sizes": {"x": [1]}}
    two = {"num_running": 1, "pages_used": {"csa": 1, "hca": 5}, "last_step_s": 0.3}
    assert add_stats(add_stats({}, one), two) == {
        "num_running": 3,
        "pages_used": {"csa": 4, "hca": 5},
        "last_step_s": 0.3,
    }


def test_metrics_are_merged_with_labels() -> None:
    """A family is written once; where an engine and an ingress have the same one, the engine's."""
    engine = b"# HELP up It runs\n# TYPE up gauge\nup 1.0\n"
    ingress = b'# TYPE up gauge\nup 0.0\n# TYPE n counter\nn_total{a="b"} 2.0\n'
    texts = [({"replica": "r"}, engine), ({"replica": "s"}, engine), ({"ingress": "i"}, ingress)]
    lines = merge_metrics(texts).decode().splitlines()
    assert lines.count("# TYPE up gauge") == 1
    assert 'up{replica="r"} 1.0' in lines
    assert 'up{replica="s"} 1.0' in lines
    assert 'n_total{a="b",ingress="i"} 2.0' in lines
    assert not [line for line in lines if line.endswith(" 0.0")]
