"""Checks every case of every op, and steps with fusions: on a GPU in worker processes, each op in
each number format first, so that a time limit leaves out second sizes, not formats."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.errors import RankError
from dsv4.ops import OPS
from dsv4.ops.core.arguments import leaves
from dsv4.ops.core.op import AnyOp, Case
from dsv4.runner.settings import available_memory
from dsv4.tools.doctor.device.machine import format_of
from dsv4.tools.doctor.device.ops import (
    HARDER,
    OpResult,
    Task,
    check_case,
    drawn,
    task_cases,
    timed,
)
from dsv4.tools.doctor.device.steps import STEP
from dsv4.tools.doctor.device.workers import WORKERS, WorkerPool, num_compilers, num_workers
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)

REPORT_SECONDS = 75.0  # time limit of a report: no case begins later
TIMING_SECONDS = 15.0  # for times, after all cases are compared, and none later than
LAST_SECONDS = 20.0  # after the time limit
_RESEARCH = ("float32", "fp32 entries")  # formats that no checkpoint has: after the others

Found = dict[tuple[Task, int], list[OpResult]]  # by task and number of its case


@dataclass(frozen=True)
class OpsCheck:
    """How `check_ops` runs."""

    device: str
    ops: Mapping[str, AnyOp]
    use_kernels: bool
    kinds: tuple[str, ...]
    end: float

    def cases(self, task: Task) -> list[Case]:
        return task_cases(self.ops[task.op], task.place, self.kinds)


def check_ops(
    device: str,
    *,
    ops: Mapping[str, AnyOp] | None = None,
    only: str = "",
    kernels: bool | None = None,
    seconds: float | None = None,
    workers: int | None = None,
    worker_module: str = WORKERS,
    progress: Progress | None = None,
) -> list[OpResult]:
    """`kernels` None: only on a GPU; a CPU runs references, which must be deterministic and finite.
    `workers` None: as many as the machine has room for; 0, as on a CPU: in this process. Cases that
    have not begun after `seconds` are skipped. `progress` gets the numbers of cases checked and of
    all."""
    use_kernels = device != "cpu" if kernels is None else kernels
    known = ops or (OPS if device == "cpu" else {**OPS, STEP.name: STEP})
    chosen = {op.name: op for op in known.values() if not only or op.name in only.split(",")}
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    how = OpsCheck(device, chosen, use_kernels, HARDER if use_kernels else HARDER[:1], end)
    tasks = ordered_tasks(chosen)
    total = sum(len(how.cases(task)) for task in tasks)
    found: Found = {}
    for task, number, results in _run(how, tasks, _count(how, tasks, workers), worker_module):
        found[task, number] = results
        if progress is not None:
            progress(len(found), total)
    if use_kernels:
        _add_times(how, tasks, found, math.inf if seconds is None else TIMING_SECONDS)
    return _merge(how, tasks, found)


def ordered_tasks(ops: Mapping[str, AnyOp]) -> list[Task]:
    """All cases but empty ones, which public functions answer themselves: the first of each op and
    format, formats of checkpoints before float32, then their second sizes, and so on. Every kind of
    step counts as a format."""
    seen: Counter[tuple[str, str]] = Counter()
    ranked: list[tuple[int, bool, int, str, int]] = []
    for op in ops.values():
        for place, case in enumerate(op.cases()):
            arguments = drawn(case)
            if any(tensor.numel() == 0 for _, tensor in leaves(arguments)):
                continue
            label = case.name if op is STEP else format_of(arguments)
            ranked.append((seen[op.name, label], label in _RESEARCH, len(ranked), op.name, place))
            seen[op.name, label] += 1
    return [Task(name, place) for *_, name, place in sorted(ranked)]


def _count(how: OpsCheck, tasks: list[Task], workers: int | None) -> int:
    if workers is not None or how.device == "cpu":
        return workers or 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(how.device)
    return num_workers(len(os.sched_getaffinity(0)), len(tasks), free, available_memory())


def _run(
    how: OpsCheck, tasks: list[Task], count: int, module: str
) -> Iterator[tuple[Task, int, list[OpResult]]]:
    if count == 0:
        yield from _run_here(how, tasks)
        return
    setup = {"device": how.device, "use_kernels": how.use_kernels, "kinds": how.kinds}
    pool, any_found = WorkerPool(setup, module), False
    try:
        if how.device != "cpu":
            compilers = num_compilers(len(os.sched_getaffinity(0)), available_memory())
            begin, done = time.monotonic(), pool.compile(tasks, compilers, how.end)
            took = time.monotonic() - begin
            log.info("compiled %s of the kernels in %.0f s", "all" if done else "some", took)
        for item in pool.check(tasks, count, how.end):
            any_found = True
            yield item
    except RankError as error:
        pool.failures.append(str(error))
    if not pool.failures:
        return
    log.warning("a process that checks ops: %s", pool.failures[0])
    if not any_found:
        yield from _run_here(how, tasks)


def _run_here(how: OpsCheck, tasks: list[Task]) -> Iterator[tuple[Task, int, list[OpResult]]]:
    """In this process: the ops' own cases before harder ones."""
    pairs = [(task, number) for task in tasks for number in range(len(how.cases(task)))]
    for task, number in sorted(pairs, key=lambda pair: pair[1] > 0):
        if time.monotonic() >= how.end:
            return
        case = how.cases(task)[number]
        scaled = number > 0
        op = how.ops[task.op]
        yield task, number, check_case(op, case, how.device, how.use_kernels, scaled=scaled)


def _add_times(how: OpsCheck, tasks: list[Task], found: Found, seconds: float) -> None:
    """Times are taken in this process, where nothing else runs; kernels come from Triton's cache.
    Harder cases have the shapes of the op's own."""
    end = min(time.monotonic() + seconds, how.end + LAST_SECONDS)
    for task in tasks:
        results = found.get((task, 0), [])
        for place, result in enumerate(results):
            if result.status == "ok" and task.op != STEP.name and time.monotonic() < end:
                case = how.cases(task)[0]
                results[place] = timed(result, how.ops[task.op], case, how.device)


def _merge(how: OpsCheck, tasks: list[Task], found: Found) -> list[OpResult]:
    """By op and case as registered, harder ones at the end."""
    order = {name: place for place, name in enumerate(how.ops)}
    tasks = sorted(tasks, key=lambda task: (order[task.op], task.place))
    own: list[OpResult] = []
    harder: list[OpResult] = []
    for task in tasks:
        for number, case in enumerate(how.cases(task)):
            results = found.get((task, number))
            if results is None:
                results = [OpResult(task.op, case.name, "none", "skipped", detail="left out")]
            (harder if number else own).extend(results)
    return own + harder


# --- what the results say -------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Counts of cases."""

    compared: int  # a kernel with its reference; on a CPU, the reference with itself
    by_reference: dict[str, int]  # op -> cases that no kernel takes, so the reference runs
    left_out: dict[str, int]  # op -> cases that were not checked

    @property
    def num_left_out(self) -> int:
        return sum(self.left_out.values())

    @property
    def total(self) -> int:
        return self.compared + sum(self.by_reference.values()) + self.num_left_out


def coverage(results: Iterable[OpResult]) -> Coverage:
    cases: dict[tuple[str, str], set[str]] = {}
    for item in results:
        cases.setdefault((item.op, item.case), set()).add(item.status)
    by_reference = Counter(op for (op, _), seen in cases.items() if seen == {"unsupported"})
    left_out = Counter(op for (op, _), seen in cases.items() if "skipped" in seen)
    compared = len(cases) - by_reference.total() - left_out.total()
    return Coverage(compared, dict(by_reference), dict(left_out))


def summarize(results: Iterable[OpResult]) -> list[dict[str, Any]]:
    """One row per op and implementation that ran: number of cases, the worst one, the longest time.
    An op whose cases no kernel takes has one row with a reason."""
    groups: dict[tuple[str, str], list[OpResult]] = {}
    for item in results:
        if item.status != "skipped":
            groups.setdefault((item.op, item.ran), []).append(item)
    ran = {op for (op, _), items in groups.items() if any(map(_was_tried, items))}
    rows = []
    for (op, name), items in groups.items():
        tried = [item for item in items if _was_tried(item)]
        if not tried and op in ran:
            continue
        ran.add(op)
        worst = max(tried, key=lambda item: item.error, default=items[0])
        rows.append(
            {
                "op": op,
                "ran": name if tried else "reference",
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


def _was_tried(item: OpResult) -> bool:
    return item.status in ("ok", "wrong")
