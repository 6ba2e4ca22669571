"""The same tokens computed in different ways must give the same bits; finds the first difference.

A record keeps every tap of one sequence, row by row. Two records are compared in the order of
computation, so the first difference is where they diverge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from dsv4.cache.geometry import SHARED_TOKENS
from dsv4.cache.pages import SequencePages
from dsv4.cache.prefix import PrefixCache, block_keys
from dsv4.model.transformer import Transformer
from dsv4.ops.core.context import observe
from dsv4.runner.plan import GraphKey, StepPlan
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import Settings
from dsv4.runner.step.shape import StepShape
from dsv4.tools.doctor.check import LayerMaker
from dsv4.tools.doctor.plain.layer import Taps
from dsv4.tools.doctor.plain.stations import STATIONS, OpCall, results
from dsv4.tools.doctor.subject import NUM_DECODED, Subject
from dsv4.tools.doctor.trace import Consumer, Tracer

_ORDER = {name: place for place, name in enumerate(STATIONS)}


class Watcher(Protocol):
    """A consumer of calls that is told each step's tokens."""

    def begin_step(self, start: int, token_ids: Tensor) -> None: ...
    def __call__(self, call: OpCall) -> None: ...


_LARGE = 1 << 22  # numbers of one tap over all tokens; larger ones are kept as digests
Key = tuple[int, int, str, str]  # layer, order of the station, station, tap


@dataclass(frozen=True)
class Crossing:
    """One comparison of two ways to compute."""

    name: str
    status: str  # ok, wrong, skipped
    detail: str
    layer: int | None = None
    station: str | None = None
    position: int | None = None


@dataclass
class TapRecord:
    """A consumer of calls that keeps the taps of one sequence of the batch."""

    make_layer: LayerMaker
    num_layers: int
    num_entries: int  # columns of index scores: rows of all steps have equal width
    rows: dict[Key, list[Tensor]] = field(default_factory=dict)
    place: int = 0
    first_row: int = 0
    taps: Taps = field(default_factory=Taps)

    def begin_step(self, start: int, token_ids: Tensor, place: int = 0, first_row: int = 0) -> None:
        self.place, self.first_row, self.taps = place, first_row, Taps()
        self.taps.begin(start, token_ids)

    def __call__(self, call: OpCall) -> None:
        layer = self.make_layer(call.layer)
        found = results(call, layer, self.taps, self.place, self.first_row)
        for tap, value in found.items():
            if tap.endswith("_tail"):
                continue  # bookkeeping at a step's end, not a token's result
            if tap == "scores":
                missing = self.num_entries - value.shape[1]
                value = torch.nn.functional.pad(value, (0, missing))
            if value[:0].flatten(1).shape[1] * 4 * self.num_entries > _LARGE:
                value = _digests(value)
            key = (call.layer, _ORDER[call.station.name], call.station.name, tap)
            self.rows.setdefault(key, []).append(value)

    def all(self, key: Key) -> Tensor:
        return torch.cat(self.rows[key])


def _digests(value: Tensor) -> Tensor:
    """One digest per row, which changes with any bit; large taps are not kept whole."""
    bits = value.flatten(1).contiguous()
    bits = bits.view(torch.int64) if bits.is_floating_point() else bits.long()
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator) * 2 + 1
    return (bits * odd.to(bits.device)).sum(1, keepdim=True)


def schedule(count: int, *, streamed: bool = False) -> list[int]:
    """A prompt split at an odd position, two single tokens, the rest; a streamed model reads twice.

    With the length from `num_tokens`, the first single token closes a block of 128.
    """
    if streamed:
        return [count - 1, 1]
    prompt = count - NUM_DECODED
    first = prompt // 2 | 1
    return [first, prompt - first, 1, 1, NUM_DECODED - 2]


def run_alone(
    runner: Runner,
    token_ids: list[int],
    steps: list[int],
    consumers: Sequence[Watcher],
    pages: SequencePages | None = None,
) -> Tracer:
    """Run one sequence through the engine, observed; `pages`: if it starts from a prefix."""
    pages = pages or runner.pages.open()
    # only the search for causes needs the state before a call
    tracer = Tracer(
        _tee(consumers), keep_state=any(not isinstance(c, TapRecord) for c in consumers)
    )
    for count in steps:
        part = token_ids[pages.length : pages.length + count]
        ids = torch.tensor(part, device=runner.device)
        tracer.begin_step()
        for consumer in consumers:
            consumer.begin_step(pages.length, ids)
        with observe(tracer):
            runner.step([Chunk(pages, part, count)])
    runner.pages.close(pages)
    return tracer


def _tee(consumers: Sequence[Watcher]) -> Consumer:
    def consume(call: OpCall) -> None:
        for consumer in consumers:
            consumer(call)

    return consume


def run_in_company(
    runner: Runner, token_ids: list[int], steps: list[int], record: TapRecord
) -> None:
    """The same sequence batched between two others of different lengths, in another slot."""
    rng = Random(1)
    most = max(token_ids) + 1
    strangers = [[rng.randrange(most) for _ in token_ids] for _ in range(2)]
    pages = [runner.pages.open() for _ in range(3)]
    tracer = Tracer(record, keep_state=False)
    for number, count in enumerate(steps):
        sizes = (5 + number % 3, count, 3) if count > 1 else (1, 1, 1)
        chunks = []
        for ids, held, size in zip(
            (strangers[0], token_ids, strangers[1]), pages, sizes, strict=True
        ):
            part = ids[held.length : held.length + size]
            chunks.append(Chunk(held, part, size))
        ids_now = torch.tensor(chunks[1].token_ids, device=runner.device)
        tracer.begin_step()
        record.begin_step(pages[1].length, ids_now, place=1, first_row=sizes[0])
        with observe(tracer):
            runner.step(chunks)
    for held in pages:
        runner.pages.close(held)


def run_from_prefix(subject: Subject, runner: Runner, record: TapRecord) -> None:
    """Another sequence leaves a cached prefix and diverges; ours starts from it."""
    ids = subject.token_ids
    boundary = (len(ids) - 1) // SHARED_TOKENS * SHARED_TOKENS
    keys = block_keys(ids[:boundary], "doctor")
    cache = PrefixCache(runner.pages, runner.state, runner.state.num_snapshots)
    other = runner.pages.open()
    runner.step([Chunk(other, ids[:boundary], 1)])
    cache.keep(other, keys[-1], other.length)
    runner.step([Chunk(other, ids[: len(ids) - boundary], 1)])
    runner.pages.close(other)
    stranger = runner.pages.open()  # overwrites the slot's state
    runner.step([Chunk(stranger, ids[:16][::-1], 1)])
    runner.pages.close(stranger)
    snapshot = cache.find(keys)
    assert snapshot is not None, "the prefix just kept is not found"
    pages = runner.pages.open()
    cache.begin(pages, snapshot)
    run_alone(runner, ids, [1] * (len(ids) - boundary), [record], pages)
    cache.clear()


class ServedRunner(Runner):
    """Steps as in serving: fixed buffers, on a GPU a replayed graph.

    Op results are kept alive: after a replay they hold the replay's numbers.
    """

    def __init__(self, model: Transformer, settings: Settings) -> None:
        self._calls: dict[GraphKey, list[OpCall]] = {}
        super().__init__(model, settings)

    def _run_once(self, key: GraphKey) -> None:
        calls: list[OpCall] = []
        with observe(Tracer(calls.append, keep_state=False)):
            super()._run_once(key)
        self._calls[key] = calls

    def decode(self, pages: SequencePages, token_id: int) -> list[OpCall]:
        shape = self.buffers.shape(1, 1, pages.length + 1, one_each=True)
        self.submit([Chunk(pages, [token_id], 1)])
        return self._calls[shape]


def run_decoder(subject: Subject, record: TapRecord) -> StepPlan:
    """-> the plan that the warm-up recorded for its graphs."""
    settings = replace(subject.settings, cuda_graphs=subject.graphs)
    runner, ids = ServedRunner(subject.model, settings), subject.token_ids
    pages = runner.pages.open()
    runner.step([Chunk(pages, ids[:-NUM_DECODED], 1)])
    for position in range(len(ids) - NUM_DECODED, len(ids)):
        record.begin_step(position, torch.tensor([ids[position]], device=runner.device))
        for call in runner.decode(pages, ids[position]):
            record(call)
    return runner.plan


def served_logits(subject: Subject, plan: StepPlan) -> Tensor:
    """Logits of an unobserved run, in which ops may be fused; `plan` records what served them."""
    runner, ids, parts = subject.runner(), subject.token_ids, []
    pages = runner.pages.open()
    for count in schedule(len(ids)):
        part = ids[pages.length : pages.length + count]
        with plan.recording(StepShape(count, 1, len(ids), count == 1)):
            parts.append(runner.step([Chunk(pages, part, count)]).clone())
    return torch.cat(parts)


def compare_served(subject: Subject, alone: TapRecord, plan: StepPlan) -> Crossing:
    name = "watched vs fused"
    layer, station = subject.config.num_layers - 1, "head"
    watched = alone.all((layer, _ORDER[station], station, "logits"))
    served = served_logits(subject, plan).double()
    same = ((served if watched.is_floating_point() else _digests(served)) == watched).all(1)
    if bool(same.all()):
        return Crossing(name, "ok", f"logits of {same.shape[0]} tokens, bit for bit")
    position = int(torch.nonzero(~same)[0])
    detail = "ops that run as one launch give other logits than one by one"
    return Crossing(name, "wrong", detail, layer, station, position)


def first_difference(name: str, right: TapRecord, other: TapRecord) -> Crossing:
    """The first in order of computation; `other` may hold only the last rows."""
    compared = 0
    for key in sorted(right.rows.keys() & other.rows.keys()):
        a, b = right.all(key), other.all(key)
        a = a[a.shape[0] - b.shape[0] :]
        compared += 1
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        if bool(same.all()):
            continue
        layer, _, station, tap = key
        row = int(torch.nonzero(~same.flatten(1).all(1))[0]) + right.all(key).shape[0] - b.shape[0]
        ratio = right.make_layer(layer).ratio
        position = row * ratio if tap in ("entries", "index_keys") else row
        detail = f"{STATIONS[station].op} gives another {tap}"
        if a.is_floating_point():
            size = float((a - b).abs().nan_to_num(nan=float("inf")).max())
            detail += f" (largest difference {size:.2g})"
        return Crossing(name, "wrong", detail, layer, station, position)
    return Crossing(name, "ok", f"{compared} results, bit for bit")


def cross_checks(
    subject: Subject, make_layer: LayerMaker, alone: TapRecord, plan: StepPlan
) -> Iterator[Crossing]:
    """`alone`: the record of the run split by `schedule`. `plan` is filled from the engine's graphs
    or, without graphs, from the steps that run here."""
    count = len(subject.token_ids)

    def record() -> TapRecord:
        return TapRecord(make_layer, subject.config.num_layers, count // 4)

    if subject.streamed:
        yield Crossing("all ways", "skipped", "a streamed model would be read again for each")
        return
    whole, company, decoded, hit = record(), record(), record(), record()
    run_alone(subject.runner(), subject.token_ids, [count], [whole])
    yield first_difference("prefill vs decode", whole, alone)
    run_in_company(subject.runner(), subject.token_ids, schedule(count), company)
    yield first_difference("alone vs batched", alone, company)
    if not subject.settings.prefix_cache or count <= SHARED_TOKENS:
        reason = "prefix_cache is off, or the prompt is shorter than a prefix"
        yield Crossing("cold vs prefix hit", "skipped", reason)
    else:
        run_from_prefix(subject, subject.runner(), hit)
        yield first_difference("cold vs prefix hit", alone, hit)
    plan.served.update(run_decoder(subject, decoded).served)
    name = "eager vs graph" if subject.graphs else "eager vs decode buffers"
    yield first_difference(name, alone, decoded)
    if not subject.graphs:
        yield Crossing("eager vs graph", "skipped", "no GPU, or cuda_graphs is off")
    yield compare_served(subject, alone, StepPlan() if plan.served else plan)
