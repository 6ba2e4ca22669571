"""The router's choice, without a cluster: which replica for which prefix, under which load."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="dsv4[ray] is not installed")

from dsv4.cache.prefix import block_keys
from dsv4.deploy import router as router_module
from dsv4.deploy.router import LOAD_BLOCKS, PrefixRouter

pytestmark = pytest.mark.ray


class Replica:
    def __init__(self, name: str) -> None:
        self.replica_id = name
        self.routing_stats: dict[str, Any] = {}


class Bench:
    """A router with three replicas, whose loads are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = {"a": 0, "b": 0, "c": 0}
        self.replicas = {name: Replica(name) for name in self.loads}
        self.router = object.__new__(PrefixRouter)
        self.now = 1000.0
        monkeypatch.setattr(PrefixRouter, "replica_queue_len_cache", self.loads)
        monkeypatch.setattr(router_module.time, "monotonic", lambda: self.now)
        self.router.initialize_state()

    def request(self, tokens: list[int], salt: str = "") -> Any:
        keys = b"".join(block_keys(tokens, salt))
        return SimpleNamespace(args=[keys, "name", b"data"], routing_context=SimpleNamespace())

    def order(self, request: Any) -> list[str]:
        ranks = asyncio.run(self.router.choose_replicas(list(self.replicas.values()), request))
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id for rank in ranks]

    def report(self, name: str, tokens: list[int]) -> None:
        """The engine of this replica keeps the state after these tokens."""
        self.replicas[name].routing_stats = {"prefix_keys": block_keys(tokens, "")[-1]}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


TURN = list(range(1000))  # 7 whole blocks


def test_a_conversation_stays_where_it_was_sent(bench: Bench) -> None:
    bench.router.on_request_routed(bench.request(TURN), "b", None)
    later = TURN + list(range(500))
    assert [bench.order(bench.request(later))[0] for _ in range(20)] == ["b"] * 20
    other = bench.request([9, *TURN])
    assert {bench.order(other)[0] for _ in range(100)} == {"a", "b", "c"}


def test_what_was_sent_is_forgotten_and_what_is_reported_is_not(bench: Bench) -> None:
    bench.router.on_request_routed(bench.request(TURN), "b", None)
    bench.report("c", TURN[:640])  # 5 blocks
    assert bench.order(bench.request(TURN))[:2] == ["b", "c"]
    bench.now += router_module.SENT_SECONDS + 1
    assert bench.order(bench.request(TURN))[0] == "c"
    bench.replicas["c"].routing_stats = {"prefix_keys": b""}  # it was evicted there
    assert {bench.order(bench.request(TURN))[0] for _ in range(100)} == {"a", "b", "c"}


def test_the_longest_prefix_wins(bench: Bench) -> None:
    bench.report("a", TURN[:256])
    bench.report("b", TURN[:768])
    assert bench.order(bench.request(TURN)) == ["b", "a", "c"]


def test_load_outweighs_a_prefix(bench: Bench) -> None:
    bench.report("b", TURN[:896])  # all 7 blocks
    bench.loads["b"] = int(7 / LOAD_BLOCKS)
    assert bench.order(bench.request(TURN))[0] == "b"
    bench.loads["b"] += 1
    assert bench.order(bench.request(TURN))[-1] == "b"


def test_without_a_prefix_the_least_busy_one(bench: Bench) -> None:
    bench.loads.update(a=3, b=1, c=2)
    assert bench.order(bench.request([1, 2, 3])) == ["b", "c", "a"]
    assert bench.order(None) == ["b", "c", "a"]


def test_tenants_have_prefixes_of_their_own(bench: Bench) -> None:
    bench.router.on_request_routed(bench.request(TURN, "one"), "b", None)
    found = {bench.order(bench.request(TURN, "other"))[0] for _ in range(100)}
    assert found == {"a", "b", "c"}
