"""Sends a request to the replica that has its prefix, unless that one has much more to do.

Ray Serve calls `choose_replicas` in the ingress for every request. A prefix is identified by the
keys of its 128-token blocks, which the engine's prefix cache also uses (`dsv4/cache/prefix.py`).
A replica has a block if its engine reported a snapshot there (routing statistics, every second), or
if a request with that block was sent to it within the last minute: it is computed by then.
"""

import random
import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

KEY_BYTES = 16
# A running or waiting request weighs as much as computing this many blocks. So a replica that is a
# little busier keeps its conversations, and one that is much busier loses them.
LOAD_BLOCKS = 2.0
SENT_SECONDS = 60.0
MAX_SENT = 65536  # blocks remembered for each replica


def split_keys(joined: bytes) -> list[bytes]:
    return [joined[place : place + KEY_BYTES] for place in range(0, len(joined), KEY_BYTES)]


class SentBlocks:
    """Blocks of the requests that went to one replica in the last minute."""

    def __init__(self) -> None:
        self._times: OrderedDict[bytes, float] = OrderedDict()

    def add(self, keys: list[bytes], now: float) -> None:
        for key in keys:
            self._times[key] = now
            self._times.move_to_end(key)
        while len(self._times) > MAX_SENT:
            self._times.popitem(last=False)

    def has(self, key: bytes, now: float) -> bool:
        return now - self._times.get(key, -SENT_SECONDS) < SENT_SECONDS


def num_cached(keys: list[bytes], reported: frozenset[bytes], sent: SentBlocks, now: float) -> int:
    """How many blocks the longest prefix held by a replica has."""
    for place in range(len(keys), 0, -1):
        if keys[place - 1] in reported or sent.has(keys[place - 1], now):
            return place
    return 0


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is optional, so mypy sees Any
    def initialize_state(self, **_: Any) -> None:
        self._sent: dict[ReplicaID, SentBlocks] = {}
        # each replica's last report, raw and split into keys
        self._reported: dict[ReplicaID, tuple[bytes, frozenset[bytes]]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        gone = self._sent.keys() - {replica.replica_id for replica in replicas}
        for replica_id in gone:
            del self._sent[replica_id]
            self._reported.pop(replica_id, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas by cost: blocks to compute there, and load. Ray takes the first with room."""
        keys = _keys_of(pending_request)
        now = time.monotonic()
        costs = []
        for replica in candidate_replicas:
            name = replica.replica_id
            sent = self._sent.setdefault(name, SentBlocks())
            held = num_cached(keys, self._reported_by(replica), sent, now) if keys else 0
            load = self.replica_queue_len_cache.get(name) or 0
            costs.append((len(keys) - held + LOAD_BLOCKS * load, random.random(), replica))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for _, _, replica in sorted(costs, key=lambda item: item[:2])]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        sent = self._sent.setdefault(replica_id, SentBlocks())
        sent.add(_keys_of(pending_request), time.monotonic())

    def _reported_by(self, replica: RunningReplica) -> frozenset[bytes]:
        joined = (replica.routing_stats or {}).get("prefix_keys", b"")
        last, keys = self._reported.get(replica.replica_id, (b"", frozenset()))
        if joined != last:
            keys = frozenset(split_keys(joined))
            self._reported[replica.replica_id] = joined, keys
        return keys


def _keys_of(request: PendingRequest | None) -> list[bytes]:
    """The keys are the first argument of `EngineReplica.answer`; other calls have none."""
    if request is None or not request.args or not isinstance(request.args[0], bytes):
        return []
    return split_keys(request.args[0])
