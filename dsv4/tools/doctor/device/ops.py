"""Compares every kernel with its reference on this machine: the op's own cases and harder ones."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dsv4.ops import OPS
from dsv4.ops.core.arguments import argument, changed_argument, copied, leaves, same_bits
from dsv4.ops.core.op import AnyOp, Arguments, Case, Kernel
from dsv4.ops.kv.pool import rotates, round_index

log = logging.getLogger(__name__)

# the argument with the activations, which is made harder
_ACTIVATION = {
    "rms_norm": "x", "mhc_pre": "streams", "mhc_boundary": "streams", "mhc_head": "streams",
    "linear": "x", "grouped_linear": "x", "rope": "x", "query_prepare": "q",
    "kv_store": "key.kv", "compress": "block.values", "index_query": "q", "index_scores": "q",
    "index_select": "scores", "attention": "q", "router": "x", "experts": "x", "sample": "logits",
}  # fmt: skip
HARDER = ("outliers", "large", "zero row", "ties")
_CODES = (torch.uint8, torch.float8_e4m3fn, torch.int16)
_NEIGHBOURS = 1e-3  # share of rounded codes that may be off by one
_REPEATS = 7
REPORT_SECONDS = 75.0  # time limit of a report; cases not begun by then are skipped and counted


@dataclass(frozen=True)
class OpResult:
    op: str
    case: str
    ran: str  # the kernel's module, or "reference"
    status: str  # ok, wrong, unsupported, skipped
    error: float = 0.0  # largest, in units of the tolerance: above 1 is wrong
    where: str = ""  # of the largest error
    atol: float = 0.0
    rtol: float = 0.0
    time_us: float = 0.0
    reference_us: float = 0.0
    detail: str = ""


def harder(case: Case, op: str, kinds: Sequence[str] = HARDER) -> Iterator[Case]:
    """The case with outliers, large values, an empty row, ties."""
    name = _ACTIVATION.get(op)
    if name is None:
        return
    for kind in kinds:
        if kind in ("outliers", "large") and op in ("index_select", "sample"):
            continue  # these only compare and exponentiate

        def build(generator: torch.Generator, kind: str = kind) -> Arguments:
            arguments = case.build(generator)
            changed = _change(argument(arguments, name), kind, generator)
            if op == "index_scores" and rotates(arguments["pool"].format):
                changed = round_index(changed, arguments["pool"].format)  # as index_query leaves it
            return changed_argument(arguments, name, changed)

        yield Case(f"{case.name}, {kind}", build, case.atol, case.rtol, case.small)


def _change(x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    if x.numel() == 0:
        return x
    if kind == "outliers":
        few = torch.rand(x.shape, generator=generator) < 0.02
        return torch.where(few, x * 1000, x)
    if kind == "large":
        return x * 300
    if kind == "zero row":
        return torch.cat((torch.where(x[:1].isinf(), x[:1], 0), x[1:]))
    return torch.where(x.isinf(), x, x.round().clamp(-1, 1))


def check_ops(
    device: str,
    *,
    ops: Mapping[str, AnyOp] | None = None,
    only: str = "",
    kernels: bool | None = None,
    seconds: float | None = None,
) -> Iterator[OpResult]:
    """`kernels` None: only on a GPU; a CPU runs references, which must be deterministic and finite.
    Every op's own cases run before harder ones; after `seconds` an op without a result gets one
    case, the others none."""
    use_kernels = device != "cpu" if kernels is None else kernels
    known = OPS if ops is None else ops
    chosen = [op for op in known.values() if not only or op.name in only.split(",")]
    kinds = HARDER if use_kernels else HARDER[:1]
    plain = [(op, case, False) for op in chosen for case in op.cases()]
    hard = [(op, made, True) for op, case, _ in plain for made in harder(case, op.name, kinds)]
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    skipped: Counter[str] = Counter()
    seen: set[str] = set()
    for op, case, is_hard in plain + hard:
        if op.name in seen and time.monotonic() >= end:
            skipped[op.name] += 1
            continue
        for result in _try_case(op, case, device, use_kernels, scaled=is_hard):
            seen.add(op.name)
            yield result
    for name, count in skipped.items():
        detail = f"{count} cases left out: {seconds:g} s were over"
        yield OpResult(name, f"{count} more", "none", "skipped", detail=detail)


def _try_case(
    op: AnyOp, case: Case, device: str, use_kernels: bool, *, scaled: bool
) -> Iterator[OpResult]:
    """A case that raises is recorded as a finding."""
    try:
        yield from _check_case(op, case, device, use_kernels, scaled=scaled)
    except Exception as error:
        log.debug("%s, %s", op.name, case.name, exc_info=True)
        ran = "kernel" if use_kernels else "reference"
        worst = float("inf")
        yield OpResult(op.name, case.name, ran, "wrong", worst, detail=f"failed: {error!r}")


def _check_case(
    op: AnyOp, case: Case, device: str, use_kernels: bool, *, scaled: bool
) -> Iterator[OpResult]:
    drawn = case.build(torch.Generator().manual_seed(1))
    if any(tensor.numel() == 0 for _, tensor in leaves(drawn)):
        return  # returned early by the public function
    arguments = copied(drawn, lambda tensor: tensor.to(device))
    if not use_kernels:
        yield _check_reference(op, case, arguments)
        return
    for kernel in op.kernels:
        reason = kernel.supports(arguments)
        if reason is not None:
            yield OpResult(op.name, case.name, _short(kernel), "unsupported", detail=reason)
            continue
        yield _check_kernel(op, kernel, case, arguments, scaled)


def _short(kernel: Kernel) -> str:
    return kernel.module.rpartition(".")[2]


def _outputs(op: AnyOp, run: Callable[[Arguments], Any], arguments: Arguments) -> dict[str, Tensor]:
    """A run's results and in-place writes, by name."""
    mine = copied(arguments)
    result = run(mine)
    return dict(leaves({"result": result, **op.written(mine)}))


def _check_reference(op: AnyOp, case: Case, arguments: Arguments) -> OpResult:
    """Two runs must give the same bits, and results must not be NaN (fresh pages are)."""
    first = _outputs(op, lambda a: op.reference(**a), arguments)
    again = _outputs(op, lambda a: op.reference(**a), arguments)
    for path, value in first.items():
        detail = "" if same_bits(value, again[path]) else "two runs of the reference differ"
        if path.startswith("result") and value.is_floating_point() and bool(value.isnan().any()):
            detail = "the reference gives NaN"
        if detail:
            worst = float("inf")
            return OpResult(op.name, case.name, "reference", "wrong", worst, path, detail=detail)
    return OpResult(op.name, case.name, "reference", "ok")


def _check_kernel(
    op: AnyOp, kernel: Kernel, case: Case, arguments: Arguments, scaled: bool
) -> OpResult:
    wanted = _outputs(op, lambda a: op.reference(**a), arguments)
    found = _outputs(op, kernel.run, arguments)
    worst, where, detail = 0.0, "", ""
    for path, value in wanted.items():
        error, place = _compare(op.name, value, found[path], case, scaled)
        if error > worst:
            worst, where = error, f"{path}{place}"
    if worst > 1:
        detail = f"{worst:.3g} times what is allowed at {where}"
    return OpResult(
        op.name,
        case.name,
        _short(kernel),
        "ok" if worst <= 1 else "wrong",
        worst,
        where,
        case.atol,
        case.rtol,
        _time_us(lambda: kernel.run(arguments), arguments),
        _time_us(lambda: op.reference(**arguments), arguments),
        detail,
    )


def _compare(
    op: str, wanted: Tensor, found: Tensor, case: Case, scaled: bool
) -> tuple[float, list[int]]:
    """The largest error in units of the tolerance, and its index."""
    if op == "index_scores":  # columns past the visible ones may be missing
        width = min(wanted.shape[1], found.shape[1])
        wanted, found = wanted[:, :width], found[:, :width]
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf"), [*found.shape]
    if wanted.dtype in _CODES:
        different = wanted.view(torch.uint8) != found.view(torch.uint8)
        first = torch.nonzero(different)[:1].flatten().tolist()
        return float(different.float().mean()) / _NEIGHBOURS, first
    a, b = wanted.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    size = a.abs().nan_to_num(0.0, 0.0, 0.0)
    if scaled and size.dim() > 1:  # sums of large numbers: relative to the row's largest
        size = size.amax(-1, keepdim=True).expand_as(a)
    allowed = case.atol + case.rtol * size + 1e-30
    error = torch.where(same, 0.0, (a - b).abs() / allowed).nan_to_num(nan=float("inf"))
    place = torch.nonzero(error == error.max())[0].tolist() if error.dim() else []
    return float(error.max()), place


def _time_us(call: Callable[[], object], arguments: Arguments) -> float:
    on_gpu = any(tensor.is_cuda for _, tensor in leaves(arguments))
    times = []
    for _ in range(_REPEATS):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return round(median(times), 1)


def summarize(results: Iterable[OpResult]) -> list[dict[str, Any]]:
    """One row per op and implementation: number of cases, the worst one, the longest time."""
    groups: dict[tuple[str, str], list[OpResult]] = {}
    for item in results:
        groups.setdefault((item.op, item.ran), []).append(item)
    rows = []
    for (op, ran), items in groups.items():
        tried = [item for item in items if item.status not in ("unsupported", "skipped")]
        worst = max(tried, key=lambda item: item.error, default=items[0])
        rows.append(
            {
                "op": op,
                "ran": ran,
                "status": "wrong" if any(i.status == "wrong" for i in items) else worst.status,
                "cases": len(tried),
                "unsupported": len(items) - len(tried),
                "worst": worst.error,
                "worst_case": worst.case,
                "where": worst.where,
                "time_us": max((i.time_us for i in tried), default=0.0),
                "detail": worst.detail,
            }
        )
    return rows
