"""Compares every op call of a run with the plain layer, on the engine's inputs and end to end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dsv4.tools.doctor.cause import Cause, find_cause
from dsv4.tools.doctor.compare import Error, Limits, difference, limits
from dsv4.tools.doctor.plain.layer import PlainLayer, Taps
from dsv4.tools.doctor.plain.stations import OpCall, layer_stations, pick, results

log = logging.getLogger(__name__)

_BESIDE = ("attn_streams", "final_streams")  # taps that not every op of their station returns
LayerMaker = Callable[[int], PlainLayer]


@dataclass
class GridCell:
    """One cell of the picture: one station of one layer, over the whole run."""

    layer: int
    station: str
    op: str
    status: str = "not run"  # ok, wrong, not run, not compared
    tap: str = ""  # where the error is largest relative to its limit
    error: Error = field(default_factory=Error)
    limit: Limits = field(default_factory=lambda: Limits(0.0, 0.0))
    position: int = 0
    step: int = 0
    cause: Cause | None = None

    @property
    def title(self) -> str:
        return self.op if self.op == self.station else f"{self.op} ({self.station})"

    @property
    def ratio(self) -> float:
        return self.error.ratio(self.limit)


@dataclass(frozen=True)
class Evidence:
    """The first wrong call of a run, for a capsule."""

    cell: GridCell
    call: OpCall
    found: dict[str, Tensor]
    expected: dict[str, Tensor]


class Checker:
    """Consumes the calls of a run of one sequence; see `Tracer`."""

    def __init__(self, num_layers: int, make_layer: LayerMaker, *, end_to_end: bool = True) -> None:
        self._make_layer = make_layer
        self._runs_own = end_to_end
        self._layer: PlainLayer | None = None
        self.taps = [Taps() for _ in range(num_layers)]
        self.own = [Taps() for _ in range(num_layers)]  # of the plain model on its own results
        self.cells: dict[tuple[int, str], GridCell] = {}
        self.first: Evidence | None = None
        self.end_to_end: dict[int, Error] = {}  # streams after a layer; the last one: logits
        self.step = -1

    def begin_step(self, start: int, token_ids: Tensor) -> None:
        self.step += 1
        self._layer = None
        for taps in (*self.taps, *self.own):
            taps.begin(start, token_ids)

    def layer(self, number: int) -> PlainLayer:
        if self._layer is None or self._layer.layer != number:
            self._layer = self._make_layer(number)
            for station in layer_stations(self._layer):
                cell = GridCell(number, station.name, station.op)
                self.cells.setdefault((number, station.name), cell)
        return self._layer

    def __call__(self, call: OpCall) -> None:
        layer, taps = self.layer(call.layer), self.taps[call.layer]
        station = call.station
        cell = self.cells.get((call.layer, station.name))
        if cell is None:  # an op that this kind of layer does not use
            cell = self.cells[call.layer, station.name] = GridCell(
                call.layer, station.name, station.op
            )
        if station.name == "mix_attention" and call.layer > 0:
            hand_on(self.taps[call.layer - 1], taps)
            self.taps[call.layer - 1].forget()
        found = results(call, layer, taps)
        taps.given = found
        taps.choices = {"experts": found["experts"]} if "experts" in found else {}
        try:
            expected = station.run(layer, taps)
        except KeyError:  # an input was not observed; that is reported elsewhere
            cell.status = "not compared"
            taps.new.update(found)
            return
        self._judge(call, cell, layer, taps, found, expected)
        taps.new.update({**expected, **found})
        if self._runs_own and station.name in ("experts", "head"):
            self._run_own(call.layer, head=station.name == "head")

    def _judge(
        self,
        call: OpCall,
        cell: GridCell,
        layer: PlainLayer,
        taps: Taps,
        found: dict[str, Tensor],
        expected: dict[str, Tensor],
    ) -> None:
        wrong = ""
        for tap in expected:
            if tap not in found and tap in _BESIDE:
                continue
            limit = limits(tap, layer.formats)
            missing = Error(float("inf"), float("inf"), 0.0)
            error = difference(found[tap], expected[tap]) if tap in found else missing
            if cell.status == "not run" or error.ratio(limit) > cell.ratio:
                cell.tap, cell.error, cell.limit = tap, error, limit
                cell.position, cell.step = _position(tap, error.row, layer, taps), self.step
                cell.status = "ok" if cell.status == "not run" else cell.status
            if not error.within(limit):
                wrong = wrong or tap
        odd = _odd_numbers(call, layer, taps, () if wrong else call.station.judged_later)
        if (wrong or odd) and cell.status != "wrong":
            cell.status = "wrong"
            cell.cause = odd or _cause(call, layer, taps, found)
            if self.first is None:  # the cell may get worse later; this is the call's own result
                self.first = Evidence(replace(cell), call, found, expected)

    def _run_own(self, number: int, *, head: bool) -> None:
        """Continue the plain model from its own results, not from the engine's."""
        layer, own, taps = self.layer(number), self.own[number], self.taps[number]
        if number > 0 and not head:
            hand_on(self.own[number - 1], own)
            self.own[number - 1].forget()
        own.choices = taps.new
        for station in layer_stations(layer):
            if head == (station.name in ("head_mix", "head")):
                own.new.update(station.run(layer, own))
        tap = "logits" if head else "ffn_streams"
        error = difference(taps.new[tap], own.new[tap])
        place = number + head
        if place not in self.end_to_end or error.worst > self.end_to_end[place].worst:
            self.end_to_end[place] = error


def hand_on(before: Taps, after: Taps) -> None:
    """Pass a layer's streams to the next one."""
    for name in ("streams", "y", "post", "comb"):
        if f"ffn_{name}" in before.new:
            after.new[f"before_{name}"] = before.new[f"ffn_{name}"]


def _position(tap: str, row: int, layer: PlainLayer, taps: Taps) -> int:
    """The token position of a tap's row."""
    if tap in ("entries", "index_keys"):
        return (taps.start // layer.ratio + row) * layer.ratio
    if tap.endswith("_tail"):
        return int(layer.tail(taps)[row])
    return taps.start + row


def _cause(call: OpCall, layer: PlainLayer, taps: Taps, found: dict[str, Tensor]) -> Cause:
    """`find_cause`, but an error in the search must not hide that the call is wrong."""
    try:
        return find_cause(call, layer, taps, found)
    except Exception as error:
        log.debug("the search for a cause failed", exc_info=True)
        return Cause("unknown", f"doctor's search for the cause failed ({error!r}); report this")


def _odd_numbers(
    call: OpCall, layer: PlainLayer, taps: Taps, skipped: tuple[str, ...]
) -> Cause | None:
    """Settings of an op that differ from the config, even if the numbers do not show it."""
    for path, expected in call.station.arguments(layer, taps).items():
        if path in skipped:
            continue
        found: Any = pick(call.before, path)
        if isinstance(expected, int | float | str) and found != expected:
            return Cause("argument", f"its argument {path} is {found}, expected {expected}", path)
    return None


def worst(cells: list[GridCell]) -> GridCell | None:
    return max(cells, key=lambda cell: cell.ratio, default=None)
