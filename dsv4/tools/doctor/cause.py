"""Why an op is wrong: its arguments, its weights, the state it reads, or the op itself."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight
from dsv4.ops.attention.attention import Visible
from dsv4.ops.core.arguments import copied
from dsv4.tools.doctor.compare import difference, limits
from dsv4.tools.doctor.plain.layer import PlainLayer, Taps
from dsv4.tools.doctor.plain.stations import ExpectedWeight, OpCall, pick, read_entries, results

SAME_WEIGHT = 1e-2  # relative: an engine may hold bf16 where the file has more bits
LIKE_WEIGHT = 0.25  # the same weight in a coarser format


@dataclass(frozen=True)
class Cause:
    kind: str  # argument, weight, input, kernel, state, reference
    text: str
    argument: str = ""


def find_cause(call: OpCall, layer: PlainLayer, taps: Taps, found: dict[str, Tensor]) -> Cause:
    return (
        _wrong_argument(call, layer, taps)
        or _wrong_input(call, layer, taps)
        or _wrong_kernel(call, layer, taps, found)
        or _wrong_state(call, layer, taps)
        or Cause(
            "reference",
            f"its arguments are right and the reference of {call.op.name} gives the same: the "
            "op's own definition is not the model's formula",
        )
    )


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    rows = difference(found.double().reshape(1, -1), expected.double().reshape(1, -1))
    return rows.worst


def _wrong_argument(call: OpCall, layer: PlainLayer, taps: Taps) -> Cause | None:
    for path, expected in call.station.arguments(layer, taps).items():
        value = pick(call.before, path)
        if isinstance(expected, ExpectedWeight):
            cause = _wrong_weight(path, value, expected, layer)
            if cause is not None:
                return cause
        elif isinstance(expected, Tensor):
            if value is None or value.shape != expected.shape:
                shape = None if value is None else tuple(value.shape)
                text = f"its argument {path} has shape {shape}, expected {tuple(expected.shape)}"
                return Cause("argument", text, path)
            if _relative(value, expected) > limits("post", layer.formats).worst:
                where = int((value.double() - expected.double()).abs().flatten().argmax())
                a, b = float(value.flatten()[where]), float(expected.flatten()[where])
                text = f"its argument {path} is {a:g} at {where}, expected {b:g}"
                return Cause("argument", text, path)
    return None


def _wrong_weight(path: str, value: Any, matrix: ExpectedWeight, layer: PlainLayer) -> Cause | None:
    """A weight that differs from the file, and the misreading of the file that explains it."""
    if value is None:
        return Cause("argument", f"its argument {path} is missing", path)
    held = dense(value).to(layer.device)
    right = layer.weight(matrix.name, matrix.expert)
    near = LIKE_WEIGHT if layer.formats.lossy else SAME_WEIGHT
    if _relative(held, right) <= near:
        return None
    name = layer.full_name(matrix.name)
    which = name if matrix.expert is None else f"{name} of expert {matrix.expert}"
    for label, wrong in layer.misreadings(matrix.name, matrix.expert):
        wrong = wrong.to(layer.device)
        if _relative(held, wrong) <= SAME_WEIGHT:
            return Cause("weight", f"{which} was read {label}", path)
        if layer.formats.lossy and _relative(wrong, right) <= near:
            return Cause("weight", f"{which}: read {label} the file agrees with the other", path)
    off = _relative(held, right)
    text = f"{which} is not what the file holds (off by {off:.1%}, no known misreading fits)"
    return Cause("weight", text, path)


def dense(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def _wrong_input(call: OpCall, layer: PlainLayer, taps: Taps) -> Cause | None:
    """An argument that should equal an earlier op's result but does not."""
    for path, tap in call.station.inputs.items():
        value = pick(call.before, path)
        if value is None or tap not in taps.new or tap in ("scores", "selected"):
            continue  # those two may be padded
        given = value[: taps.stop - taps.start].double()
        right = (
            taps.new[tap].reshape(given.shape) if given.numel() == taps.new[tap].numel() else None
        )
        if right is None or _relative(given, right) > limits("post", layer.formats).worst:
            text = f"its argument {path} is not the {tap} that the op before it gave"
            return Cause("input", text, path)
    return None


def _wrong_kernel(
    call: OpCall, layer: PlainLayer, taps: Taps, found: dict[str, Tensor]
) -> Cause | None:
    arguments = copied(call.before)
    result = call.op.reference(**arguments)
    again = results(OpCall(call.layer, call.station, call.op, {}, arguments, result), layer, taps)
    for tap, value in again.items():
        if not difference(found[tap], value).within(limits(tap, layer.formats)):
            text = f"what ran differs from the reference of {call.op.name} on the same arguments"
            return Cause("kernel", text)
    return None


def _wrong_state(call: OpCall, layer: PlainLayer, taps: Taps) -> Cause | None:
    """Keys or rows that differ from what was written."""
    a = call.before
    if call.station.name == "attention":
        first = max(taps.start - layer.config.sliding_window + 1, 0)
        numbers = torch.arange(first, taps.stop)
        to: Visible = a["to"]
        cause = _stale(to.pool, to.table, numbers, taps.all("key")[first:], "window key", 1)
        if cause is None and to.compressed is not None:
            entries, held = taps.all("entries"), to.compressed
            numbers = torch.arange(entries.shape[0])
            cause = _stale(held.pool, held.table, numbers, entries, "entry", layer.ratio)
        return cause
    if call.station.name == "index_scores":
        keys, held = taps.all("index_keys"), a["to"]
        return _stale(held.pool, held.table, torch.arange(keys.shape[0]), keys, "index key", 4)
    if call.station.op == "compress" and taps.start > 0:
        return _stale_tail(call, layer, taps)
    return None


def _stale(
    pool: Any, table: Tensor, numbers: Tensor, written: Tensor, what: str, tokens: int
) -> Cause | None:
    if numbers.numel() == 0:
        return None  # nothing was written yet
    held = read_entries(pool, table, 0, numbers)
    same = ((held - written).abs() <= 1e-6 * written.abs().amax()).flatten(1).all(1)
    if bool(same.all()):
        return None
    wrong = int(torch.nonzero(~same)[0])
    number = int(numbers[wrong])
    column = number // pool.page_entries % table.shape[1]
    text = (
        f"the {what} of position {number * tokens} is no longer what was written (page "
        f"{int(table[0, column])}): a page was given away too early, or the table is wrong"
    )
    return Cause("state", text)


def _stale_tail(call: OpCall, layer: PlainLayer, taps: Taps) -> Cause | None:
    state, batch = call.before["block"].state, call.before["block"].batch
    before = torch.arange(max(taps.start - state.rows, 0), taps.start)
    if before.numel() == 0:
        return None
    held = state.values[int(batch.slots[0]), before % state.rows].double()
    tap = "values" if call.station.name == "entries" else "index_values"
    written = taps.all(tap)[before]
    same = ((held - written).abs() <= 1e-6 * written.abs().amax()).all(1)
    if bool(same.all()):
        return None
    position = int(before[int(torch.nonzero(~same)[0])])
    text = f"the compressor no longer holds the values of position {position}"
    return Cause("state", text)
