"""Every layout has the bits of one rank: logits and all state, with ranks as threads.

The orders mix prompts in chunks, decoding, several sequences at once, rows fewer than ranks, a
snapshot restored into another slot, and a slot that is used again.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, Geometry
from dsv4.cache.state import StateTensors
from dsv4.config import ModelConfig
from dsv4.errors import RankError
from dsv4.model import attention as attention_module
from dsv4.model import exchange as exchange_module
from dsv4.model import transformer as transformer_module
from dsv4.model.attention import Attention
from dsv4.model.exchange import Exchange, ReplicatedRows, ShardedRows
from dsv4.model.inputs import StepInputs
from dsv4.model.transformer import Transformer
from dsv4.ops.comm.sharded import ExpertSums
from dsv4.ops.core.ragged import make_ragged
from dsv4.parallel.comm import Comm, SingleRankComm
from dsv4.parallel.layout import RankLayout, balance
from dsv4.parallel.probe import probe
from dsv4.runner.ranks.lanes import LogitsInFlight
from dsv4.testing import as_dtype, random_weights, small_config
from tests.parallel.threads import ThreadComm, ThreadWorld

CPU = torch.device("cpu")
CONFIG = small_config(
    num_layers=4, num_hash_layers=2, compress_ratios=(0, 4, 128, 4), num_heads=8, o_groups=8,
    o_lora_rank=32, num_experts=16, num_experts_per_tok=3, hc_sinkhorn_iters=4, vocab_size=101,
)  # fmt: skip
WEIGHTS = random_weights(CONFIG, 3)
SLOTS, PAGES = 3, 6  # pages of each pool that a slot has, at fixed numbers
# steps: (slot, new tokens) of each sequence
STEPS = (
    ((0, 129),),
    ((0, 1), (1, 7)),
    ((0, 1), (1, 1), (2, 1)),
    ((2, 21), (0, 1)),
)


@dataclass(frozen=True)
class Formats:
    kv: str = "fp32"
    index: str = "fp32"
    dtype: torch.dtype = torch.float32


def weights_of(config: ModelConfig, layout: RankLayout) -> dict[str, Tensor]:
    """A rank's slices, by plain indexing."""
    groups, heads, experts = layout.groups(config), layout.heads(config), layout.experts(config)
    vocab, inner, outer = layout.vocab(config), layout.inner(config), layout.outer(config)
    rank, all_of = config.o_lora_rank, slice(experts.start, experts.stop)
    rows: dict[str, Any] = {
        "attn.wq_b.weight": slice(heads.start * config.head_dim, heads.stop * config.head_dim),
        "attn.attn_sink": slice(heads.start, heads.stop),
        "attn.wo_a.weight": slice(groups.start * rank, groups.stop * rank),
        "ffn.experts.w13": all_of,
        "ffn.experts.w2": all_of,
    }
    if inner is not None and outer is not None:
        halves = [*inner, *(config.moe_intermediate_size + i for i in inner)]
        rows["ffn.experts.w13"] = (all_of, halves)
        rows["ffn.experts.w2"] = (all_of, slice(outer.start, outer.stop))
    table = {}
    for name, weight in WEIGHTS.items():
        parts = name.split(".", 2)
        if parts[0] == "layers":
            if int(parts[1]) in layout.layers(config):
                table[name] = weight[rows.get(parts[2], slice(None))]
        elif name == "embed.weight":
            if layout.is_first:
                table[name] = weight
        elif layout.is_last:
            is_head = name == "head.weight"
            table[name] = weight[vocab.start : vocab.stop] if is_head else weight
    return table


class Rank:
    """One rank with its model and state, fed with the same orders as all others."""

    def __init__(
        self, layout: RankLayout, comm: Comm, rows_from: int, formats: Formats, config: ModelConfig
    ) -> None:
        self.layout = layout
        table = as_dtype(weights_of(config, layout), formats.dtype)
        exchange = Exchange(layout, comm, config, rows_from)
        self.model = Transformer(config, table, formats.dtype, exchange)
        geometry = Geometry(config, formats.kv, formats.index, chunk_tokens=160, kept_prefixes=1)
        pages = dict.fromkeys(POOLS, SLOTS * PAGES)
        self.state = StateTensors(geometry, SLOTS, pages, "cpu", layout.layers(config))
        self.lengths = [0] * SLOTS

    @torch.inference_mode()
    def run(self) -> list[Tensor]:
        """Logits of each step; rank 0 begins as many steps as there are stages before it waits."""
        found, lanes = [], LogitsInFlight(self.model, CPU)
        for seed, work in enumerate(STEPS):
            inputs = self.inputs(work, seed)
            if self.layout.rank or self.layout.pp == 1:
                found.append(self.model(inputs, self.state.layers))
                continue
            lanes.make_room()
            self.model.run_stage(inputs, self.state.layers)
            logits = lanes.expect(len(work))
            assert logits is not None
            found.append(logits)
        lanes.wait_for_all()
        return found

    def inputs(self, work: tuple[tuple[int, int], ...], seed: int) -> StepInputs:
        if seed == 2:  # slot 2 goes on from slot 0's snapshot
            self.state.save_rows(1, 0)
            self.state.restore_rows(0, 2)
        rng = random.Random(seed)
        slots, counts = [slot for slot, _ in work], [new for _, new in work]
        starts = [self.lengths[slot] for slot in slots]
        tables = torch.tensor([[slot * PAGES + i for i in range(PAGES)] for slot in slots])
        inputs = StepInputs(
            token_ids=torch.tensor([rng.randrange(101) for _ in range(sum(counts))]),
            batch=make_ragged(starts, counts, slots, CPU),
            window_table=tables,
            csa_table=tables,
            hca_table=tables,
            logits_rows=None if max(counts) == 1 else torch.tensor(counts).cumsum(0) - 1,
        )
        for slot, count in work:
            self.lengths[slot] += count
        return inputs

    def state_bytes(self) -> list[list[Tensor]]:
        """By layer."""
        return [
            [
                tensor.contiguous().view(-1).view(torch.uint8).clone()
                for tensor in (
                    *(part for _, pool in layer.pools() for part in pool.parts.values()),
                    *layer.carried(),
                )
            ]
            for layer in self.state.layers
        ]


# logits of rank 0 by step; state of each rank by layer of its stage
Results = tuple[list[Tensor], list[list[list[Tensor]]]]


def results(
    tp: int,
    pp: int,
    rows_from: int,
    formats: Formats,
    wrap: Callable[[Comm], Comm] = lambda comm: comm,
    config: ModelConfig = CONFIG,
    split: bool = False,
) -> Results:
    stages = balance([1] * config.num_layers, pp)
    world = ThreadWorld(tp, pp)
    layouts = [RankLayout(tp, pp, rank, stages, split) for rank in range(tp * pp)]
    comms = [SingleRankComm() if tp * pp == 1 else world.rank(layout) for layout in layouts]
    ranks = [
        Rank(layout, wrap(comm), rows_from, formats, config)
        for layout, comm in zip(layouts, comms, strict=True)
    ]
    logits = world.run([rank.run for rank in ranks])
    return logits[0], [rank.state_bytes() for rank in ranks]


FORMATS = {
    "exact": Formats(),
    "trained": Formats("fp8", "fp4", torch.bfloat16),
}
_alone: dict[str, Results] = {}


def alone(name: str) -> Results:
    if name not in _alone:
        _alone[name] = results(1, 1, 10**9, FORMATS[name])
    return _alone[name]


def check_equal(found: Results, name: str, tp: int, pp: int) -> None:
    logits, states = alone(name)
    for step, (a, b) in enumerate(zip(found[0], logits, strict=True)):
        assert torch.equal(a, b), f"logits of step {step}"
    for rank, state in enumerate(found[1]):
        stage = balance([1] * CONFIG.num_layers, pp)[rank // tp]
        wanted = [states[0][layer] for layer in stage]
        for layer, (found_parts, parts) in enumerate(zip(state, wanted, strict=True)):
            for a, b in zip(found_parts, parts, strict=True):
                assert torch.equal(a, b), f"state of rank {rank}, its layer {layer}"


COPIES, ROWS, BOTH = 10**9, 1, 20  # rows of a step from which ranks own rows
LAYOUTS = [
    (1, 2, COPIES), (1, 3, COPIES), (2, 1, BOTH), (4, 2, BOTH),
    *((tp, pp, form) for tp in (2, 4, 8) for pp in (1, 2, 3) for form in (COPIES, ROWS)),
]  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "rows_from"), LAYOUTS)
def test_layouts_have_the_bits_of_one_rank(tp: int, pp: int, rows_from: int) -> None:
    name = "trained" if (tp, pp) in ((2, 2), (8, 1)) else "exact"
    check_equal(results(tp, pp, rows_from, FORMATS[name]), name, tp, pp)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 3), (4, 1), (4, 3), (8, 2), (1, 3)])
def test_trained_formats_have_the_bits_of_one_rank(tp: int, pp: int) -> None:
    check_equal(results(tp, pp, BOTH, FORMATS["trained"]), "trained", tp, pp)


# a long prompt with replicated rows; with sharded ones, steps of fewer rows than ranks
SPLIT = [(2, 1, COPIES), (4, 2, COPIES), (4, 1, ROWS), (8, 1, ROWS),
         *((tp, pp, BOTH) for tp in (2, 4, 8) for pp in (1, 2, 3))]  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "rows_from"), SPLIT)
def test_split_experts_have_the_bits_of_whole_ones(tp: int, pp: int, rows_from: int) -> None:
    name = "trained" if tp == 2 else "exact"
    check_equal(results(tp, pp, rows_from, FORMATS[name], split=True), name, tp, pp)


class Sleepy:
    """Every call begins late, each time by another while."""

    def __init__(self, comm: Comm, seed: int) -> None:
        self._comm, self._rng = comm, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        time.sleep(self._rng.random() * 0.002)
        return getattr(self._comm, name)


def test_the_order_of_arrival_does_not_matter() -> None:
    seeds = iter(range(100))
    found = results(4, 2, BOTH, FORMATS["exact"], lambda comm: Sleepy(comm, next(seeds)))
    check_equal(found, "exact", 4, 2)


class Flipped:
    """The second byte that this rank sends to its tensor group arrives wrong."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def gather(self, out: Tensor, x: Tensor) -> None:
        x = x.clone()
        x[1] ^= 1
        self._comm.gather(out, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def test_a_probe_sees_a_wait_that_failed() -> None:
    comm: Any = SingleRankComm()
    comm.error = torch.zeros(1, dtype=torch.int32)
    probe(comm, RankLayout(), 64, 2, CPU)
    comm.error += 3
    with pytest.raises(RankError, match="rank 0 waited in vain for place 2"):
        probe(comm, RankLayout(), 64, 2, CPU)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_probe_finds_a_wrong_byte(flipped: bool) -> None:
    stages, world = balance([1] * 4, 2), ThreadWorld(2, 2, 5.0)
    layouts = [RankLayout(2, 2, rank, stages) for rank in range(4)]
    comms: list[Any] = [world.rank(layout) for layout in layouts]
    if flipped:
        comms[3] = Flipped(comms[3])
    works = [
        partial(probe, comm, layout, 64, 2, CPU)
        for comm, layout in zip(comms, layouts, strict=True)
    ]
    if not flipped:
        times = world.run(works)
        assert all(gather > 0 for gather, _ in times)
        assert [send > 0 for _, send in times] == [True, True, False, False]
        return
    with pytest.raises(RankError, match=r"rank [23] received 1 of 64 bytes from rank 3 not as"):
        world.run(works)


# --- mistakes that others have made, which the comparison must see --------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def ranges_of_the_shard(patch: pytest.MonkeyPatch) -> None:
    """K cut by the number of ranks, not by the whole matrix."""
    patch.setattr(attention_module, "k_ranges", lambda config: 2)
    patch.setattr(exchange_module, "k_ranges", lambda config: 2)


def sum_as_they_arrive(patch: pytest.MonkeyPatch) -> None:
    right = ReplicatedRows.gather

    def gather(self: ReplicatedRows, x: Tensor) -> Tensor:
        return right(self, x).roll(1, 0) if x.dim() == 3 and x.shape[0] == 4 else right(self, x)

    patch.setattr(ReplicatedRows, "gather", gather)


def shared_expert_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    right = ExpertSums.shared
    patch.setattr(ExpertSums, "shared", lambda self: 2 * right(self))
    alone = exchange_module.shared_expert
    patch.setattr(exchange_module, "shared_expert", lambda x, by: 2 * alone(x, by))


def sinks_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    right, half = Attention.__init__, CONFIG.num_heads // 2

    def init(self: Attention, *rest: Any) -> None:
        right(self, *rest)
        for layer in range(CONFIG.num_layers):
            sinks = WEIGHTS[f"layers.{layer}.attn.attn_sink"]
            if torch.equal(self.sink, sinks[half:]):
                self.sink = sinks[:half]

    patch.setattr(Attention, "__init__", init)


def columns_of_split_experts_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = ReplicatedRows.all_columns
    patch.setattr(ReplicatedRows, "all_columns", lambda self, x: right(self, x).roll(1, 1))


def joined_rows_of_split_experts_cut_as_one(patch: pytest.MonkeyPatch) -> None:
    """The first rank gets W1 and the second W3, instead of half of each."""
    right = weights_of

    def wrong(config: ModelConfig, layout: RankLayout) -> dict[str, Tensor]:
        table, place = right(config, layout), layout.tp_rank
        for name in (name for name in table if name.endswith(".w13") and "shared" not in name):
            table[name] = WEIGHTS[name].chunk(layout.tp, 1)[place]
        return table

    patch.setitem(globals(), "weights_of", wrong)


def groups_cut_by_heads(patch: pytest.MonkeyPatch) -> None:
    """Rows of `wo_a` dealt out in turn instead of whole groups."""
    right = Attention.__init__

    def init(self: Attention, *rest: Any) -> None:
        right(self, *rest)
        wo_a: Any = self.wo_a
        if not isinstance(wo_a, Tensor):
            self.wo_a = wo_a.map(lambda w: w.view(-1, 4, w.shape[1]).transpose(0, 1).flatten(0, 1))

    patch.setattr(Attention, "__init__", init)


def streams_expanded_again(patch: pytest.MonkeyPatch) -> None:
    right = Transformer._streams

    def streams(self: Transformer, *rest: Any) -> Tensor:
        found = right(self, *rest)
        return found[:, :1].expand_as(found).contiguous()

    patch.setattr(Transformer, "_streams", streams)


def update_left_out_between_stages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformer_module, "finish", lambda residual: residual.streams)


def head_collapse_at_each_boundary(patch: pytest.MonkeyPatch) -> None:
    right = transformer_module.finish

    def finish(residual: Any) -> Tensor:
        streams: Tensor = right(residual)
        return streams.mean(1, keepdim=True).expand_as(streams).contiguous()

    patch.setattr(transformer_module, "finish", finish)


def tokens_missing_on_later_stages(patch: pytest.MonkeyPatch) -> None:
    right = Transformer.run_stage

    def run_stage(self: Transformer, step: StepInputs, *rest: Any) -> Tensor:
        if not self.exchange.layout.is_first:
            step = replace(step, token_ids=torch.zeros_like(step.token_ids))
        return right(self, step, *rest)

    patch.setattr(Transformer, "run_stage", run_stage)


def a_stale_round(patch: pytest.MonkeyPatch) -> None:
    """A rank reads what its neighbour laid down one call before."""
    right, before = ThreadComm.gather, {}

    def gather(self: ThreadComm, out: Tensor, x: Tensor) -> None:
        right(self, out, x)
        key = (id(self), out.shape, out.dtype)
        fresh = out.clone()
        if key in before and self._layout.tp_rank == 0:
            out[1].copy_(before[key][1])
        before[key] = fresh

    patch.setattr(ThreadComm, "gather", gather)


def vocabulary_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = Exchange.logits
    patch.setattr(Exchange, "logits", lambda self, x, head: right(self, x, head).roll(1, 1))


def rows_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Token ids of other rows than the owned ones: they are embedded, hash layers route by them."""
    right = ShardedRows.own

    def own(self: ShardedRows, rows: Tensor) -> Tensor:
        return right(self, rows.roll(1, 0) if rows.dim() == 1 else rows)

    patch.setattr(ShardedRows, "own", own)


MISTAKES: dict[Patch, tuple[int, int, int]] = {
    ranges_of_the_shard: (2, 1, COPIES),
    sum_as_they_arrive: (2, 1, COPIES),
    shared_expert_on_every_rank: (2, 1, COPIES),
    sinks_of_the_first_rank: (2, 1, COPIES),
    groups_cut_by_heads: (2, 1, ROWS),
    streams_expanded_again: (1, 2, COPIES),
    update_left_out_between_stages: (1, 2, COPIES),
    head_collapse_at_each_boundary: (1, 2, COPIES),
    tokens_missing_on_later_stages: (1, 3, COPIES),
    rows_of_a_neighbour: (2, 1, ROWS),
    a_stale_round: (2, 1, COPIES),
    vocabulary_in_the_wrong_order: (2, 1, COPIES),
    columns_of_split_experts_in_the_wrong_order: (2, 1, ROWS),
    joined_rows_of_split_experts_cut_as_one: (2, 1, COPIES),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_seen(mistake: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    alone("exact")
    mistake(monkeypatch)
    tp, pp, rows_from = MISTAKES[mistake]
    split = "split_experts" in mistake.__name__
    with pytest.raises(AssertionError, match="logits of step"):
        check_equal(results(tp, pp, rows_from, FORMATS["exact"], split=split), "exact", tp, pp)
