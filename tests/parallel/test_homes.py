"""Data-parallel attention (`attention=dp`): sequences live on one rank each, and every logit and
all state have the bits of one rank. Ranks are threads here; test_homes_engine.py has processes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model import exchange as exchange_module
from dsv4.model.exchange import Exchange, HomedRows
from dsv4.model.inputs import HomeRows, StepInputs
from dsv4.ops.comm.sharded import combine_experts, sum_in_order
from dsv4.parallel.layout import RankLayout, balance
from tests.parallel.test_threads import (
    CONFIG,
    FORMATS,
    Formats,
    Rank,
    Results,
    alone,
)
from tests.parallel.threads import ThreadComm, ThreadWorld

Work = tuple[tuple[int, int], ...]


def home_of(slot: int, tp: int) -> int:
    """Slots 1 and 2 share a home, because one goes on from the other's snapshot; with more than two
    homes some have no sequence."""
    return 0 if slot else tp - 1


class HomeRank(Rank):
    """Gets the orders of all, runs the part of its own sequences."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.untouched = self.state_bytes()

    def inputs(self, work: Work, seed: int) -> StepInputs:
        tp, place = self.layout.tp, self.layout.tp_rank
        before = list(self.lengths)
        whole = super().inputs(work, seed)
        counts = [new for _, new in work]
        by_home = [[i for i, (slot, _) in enumerate(work) if home_of(slot, tp) == home]
                   for home in range(tp)]  # fmt: skip
        logits = tuple(len(own) for own in by_home)
        order = [0] * len(work)
        for home, own in enumerate(by_home):
            for index, i in enumerate(own):
                order[i] = home * max(logits) + index
        homes = HomeRows(
            tuple(sum(counts[i] for i in own) for own in by_home), logits, torch.tensor(order)
        )
        ends = torch.tensor(counts).cumsum(0).tolist()
        rows = [row for i in by_home[place] for row in range(ends[i] - counts[i], ends[i])]
        mine = tuple(work[i] for i in by_home[place])
        self.lengths, after = before, self.lengths
        # random token ids are made for all, so each takes its own
        own = super().inputs(mine, 99) if mine else replace(whole, **_nothing(whole))
        self.lengths = after
        ids = whole.token_ids[torch.tensor(rows, dtype=torch.int64)]
        if max(counts) == 1:
            return replace(own, token_ids=ids, logits_rows=None, homes=homes)
        last = torch.tensor([counts[i] for i in by_home[place]], dtype=torch.int64).cumsum(0) - 1
        return replace(own, token_ids=ids, logits_rows=last, homes=homes)


def _nothing(step: StepInputs) -> dict[str, Any]:
    names = ("positions", "seq_idx", "first_rows", "starts", "ends", "slots")
    empty = {name: torch.zeros(0, dtype=torch.int64) for name in names}
    tables = {name: getattr(step, name)[:0] for name in ("window_table", "csa_table", "hca_table")}
    return {"batch": replace(step.batch, **empty), **tables}


class EvenPushes:
    """As ranks do that write to each other's memory: every owner has the same number of rows."""

    def __init__(self, comm: ThreadComm, tp: int) -> None:
        self._comm, self._tp = comm, tp

    def to_owners(self, x: Tensor, per_owner: int) -> Tensor:
        assert len(x) == self._tp * per_owner, "rows are not even"
        out = x.new_empty(self._tp, per_owner, x.shape[1])
        self._comm.exchange(out.flatten(0, 1), x, [per_owner] * self._tp, [per_owner] * self._tp)
        return out.transpose(0, 1).reshape(per_owner, -1)

    def sum_pairs(self, parts: Tensor, experts: Tensor, shared: Tensor, per_owner: int) -> Tensor:
        chosen, size = experts.shape[1], parts.shape[3]
        held = (experts >= 0)[:, :, None]
        mine = sum_in_order(parts[:, :chosen], 2).where(held, 0.0).flatten(1)
        pairs = self.to_owners(mine, per_owner).view(per_owner, self._tp, chosen, size)
        return combine_experts(pairs.sum(1).unsqueeze(2), shared, shared.dtype)  # one is not zero


class PushingComm(ThreadComm):
    def __init__(self, comm: ThreadComm, tp: int) -> None:
        self.__dict__ = comm.__dict__
        self.pushes = EvenPushes(comm, tp)  # type: ignore[assignment]


def results(
    tp: int,
    pp: int,
    formats: Formats,
    config: ModelConfig = CONFIG,
    split: bool = False,
    pushes: bool = False,
) -> Results:
    stages, world = balance([1] * config.num_layers, pp), ThreadWorld(tp, pp)
    layouts = [
        RankLayout(tp, pp, rank, stages, split, data_attention=True) for rank in range(tp * pp)
    ]
    comms = [world.rank(layout) for layout in layouts]
    if pushes:
        comms = [PushingComm(comm, tp) for comm in comms]
    ranks = [
        HomeRank(layout, comm, 20, formats, config)
        for layout, comm in zip(layouts, comms, strict=True)
    ]
    logits = world.run([rank.run for rank in ranks])
    found = [rank.state_bytes() for rank in ranks]
    for rank, state in zip(ranks, found, strict=True):
        for layers in zip(state, rank.untouched, strict=True):
            for parts in zip(*layers, strict=True):
                for slot, (own, before) in enumerate(zip(*map(_by_slot, parts), strict=True)):
                    if home_of(slot, tp) != rank.layout.tp_rank and slot != 2:
                        assert torch.equal(own, before), "a rank wrote another home's state"
    return logits[0], found


def check_equal(found: Results, name: str, tp: int, pp: int) -> None:
    logits, states = alone(name)
    for step, (a, b) in enumerate(zip(found[0], logits, strict=True)):
        assert torch.equal(a, b), f"logits of step {step}"
    for rank, state in enumerate(found[1]):
        stage = balance([1] * CONFIG.num_layers, pp)[rank // tp]
        slots = [slot for slot in range(3) if home_of(slot, tp) == rank % tp]
        for layer, parts in zip(stage, state, strict=True):
            for a, b in zip(parts, states[0][layer], strict=True):
                for slot, (own, other) in enumerate(zip(_by_slot(a), _by_slot(b), strict=True)):
                    if slot in slots:
                        assert torch.equal(own, other), f"rank {rank}, layer {layer}, slot {slot}"


def _by_slot(part: Tensor) -> tuple[Tensor, ...]:
    """Pages and rows of slots come in the order of slots, so bytes divide evenly."""
    assert part.numel() % 3 == 0
    return part.chunk(3)


@pytest.mark.parametrize(
    ("tp", "pp", "split"),
    [(2, 1, False), (4, 1, False), (8, 1, True), (2, 2, False), (4, 2, True)],
)
def test_homes_have_the_bits_of_one_rank(tp: int, pp: int, split: bool) -> None:
    name = "trained" if (tp, pp) in ((4, 1), (2, 2)) else "exact"
    check_equal(results(tp, pp, FORMATS[name], split=split), name, tp, pp)


@pytest.mark.parametrize(("tp", "split"), [(2, False), (4, True)])
def test_ranks_that_push_have_even_rows(tp: int, split: bool) -> None:
    """Homes bring different numbers of rows, some none: the exchange is padded."""
    check_equal(results(tp, 1, FORMATS["exact"], split=split, pushes=True), "exact", tp, 1)


# --- mistakes that the comparison must see --------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def rows_in_the_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Logits as they are gathered, not in the order of the sampler."""
    right = HomedRows.hidden

    def hidden(self: HomedRows, *rest: Any) -> Tensor:
        order = self.homes.order.sort().values
        self.homes = replace(self.homes, order=order)
        return right(self, *rest)

    patch.setattr(HomedRows, "hidden", hidden)


def padding_counted_as_rows(patch: pytest.MonkeyPatch) -> None:
    """Row counts taken as equal: rows of one home are read as another's."""

    def all_rows(self: HomedRows, x: Tensor) -> Tensor:
        most = max(self.owned)
        every = self.gather(exchange_module._padded(x, most - x.shape[0]))
        return every.flatten(0, 1)[: sum(self.owned)]

    patch.setattr(HomedRows, "all_rows", all_rows)


def experts_of_own_rows_only(patch: pytest.MonkeyPatch) -> None:
    """Pairs with experts of other ranks are left out."""
    right = exchange_module.own_experts

    def own(experts: Tensor, held: range, load: Tensor | None = None) -> Tensor:
        found = right(experts, held, load)
        return found.where(found < 1, 0)

    patch.setattr(exchange_module, "own_experts", own)


def heads_of_a_slice(patch: pytest.MonkeyPatch) -> None:
    """wo_b applied as if the groups were spread: half of them are taken for all."""

    def project(self: HomedRows, out: Tensor, wo_a: Any, wo_b: Any) -> Tensor:
        grouped = exchange_module.grouped_linear(out, wo_a)
        half = grouped.shape[1] // 2
        other = torch.cat([grouped[:, half:], grouped[:, :half]], 1)
        found: Tensor = exchange_module.linear(other, wo_b)
        return found

    patch.setattr(HomedRows, "project", project)


@pytest.mark.parametrize(
    "mistake",
    [
        rows_in_the_order_of_ranks,
        padding_counted_as_rows,
        experts_of_own_rows_only,
        heads_of_a_slice,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_mistakes_are_seen(mistake: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    alone("exact")
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="logits of step"):
        check_equal(results(2, 1, FORMATS["exact"]), "exact", 2, 1)


def test_a_form_is_chosen_by_the_step() -> None:
    exchange = Exchange(
        RankLayout(2, data_attention=True), ThreadWorld(2, 1).rank(RankLayout(2)), CONFIG
    )
    homes = HomeRows((1, 0), (1, 0), torch.zeros(1, dtype=torch.int64))
    assert isinstance(exchange.sharing(1, homes), HomedRows)
