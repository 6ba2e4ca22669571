"""Compares kernels with their references on one case: the op's own cases and harder ones."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class OpResult:
    op: str
    case: str
    ran: str  # the kernel's module, or "reference"
    status: str  # ok, wrong, unsupported (the reference runs), skipped
    error: float = 0.0  # largest, in units of the tolerance: above 1 is wrong
    where: str = ""  # of the largest error
    atol: float = 0.0
    rtol: float = 0.0
    time_us: float = 0.0
    reference_us: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class Task:
    """An op's own case and the harder ones made of it: they have its shapes, so its kernels."""

    op: str
    place: int  # among the op's cases


def task_cases(op: AnyOp, place: int, kinds: Sequence[str]) -> list[Case]:
    case = next(itertools.islice(op.cases(), place, None))
    return [case, *harder(case, op.name, kinds)]


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
            if op == "index_scores" and rotates(fmt := arguments["to"].pool.format):
                changed = round_index(changed, fmt)  # as index_query leaves it
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


def check_case(
    op: AnyOp, case: Case, device: str, use_kernels: bool, *, scaled: bool
) -> list[OpResult]:
    """One result for each kernel, or one for the reference. A case that raises is a finding."""
    found: list[OpResult] = []
    try:
        found.extend(_check_case(op, case, device, use_kernels, scaled=scaled))
    except Exception as error:
        log.debug("%s, %s", op.name, case.name, exc_info=True)
        ran = "kernel" if use_kernels else "reference"
        worst = float("inf")
        found.append(OpResult(op.name, case.name, ran, "wrong", worst, detail=f"failed: {error!r}"))
    return found


def _check_case(
    op: AnyOp, case: Case, device: str, use_kernels: bool, *, scaled: bool
) -> Iterator[OpResult]:
    arguments = arguments_of(case, device)
    if not use_kernels:
        yield _check_reference(op, case, arguments)
        return
    for kernel in op.kernels:
        reason = kernel.supports(arguments)
        if reason is not None:
            yield OpResult(op.name, case.name, kernel.name, "unsupported", detail=reason)
            continue
        yield _check_kernel(op, kernel, case, arguments, scaled)


def drawn(case: Case) -> Arguments:
    return case.build(torch.Generator().manual_seed(1))


def arguments_of(case: Case, device: str) -> Arguments:
    arguments: Arguments = copied(drawn(case), lambda tensor: tensor.to(device))
    return arguments


def timed(result: OpResult, op: AnyOp, case: Case, device: str) -> OpResult:
    """The result with the times of its kernel and of the reference."""
    arguments = arguments_of(case, device)
    kernel = next(kernel for kernel in op.kernels if kernel.name == result.ran)
    calls = (lambda: kernel.run(arguments), lambda: op.reference(**arguments))
    try:
        kernel_us, reference_us = (_time_us(call, arguments) for call in calls)
    except Exception as error:
        log.debug("%s, %s", op.name, case.name, exc_info=True)
        return replace(result, status="wrong", detail=f"failed while it was timed: {error!r}")
    return replace(result, time_us=kernel_us, reference_us=reference_us)


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
        kernel.name,
        "ok" if worst <= 1 else "wrong",
        worst,
        where,
        case.atol,
        case.rtol,
        detail=detail,
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
    call()  # loads the kernel
    for _ in range(_REPEATS):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return round(median(times), 1)
