"""Every case of every op: in which order, in several processes, what a process that dies leaves."""

import signal
import time
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from dsv4.ops import OPS
from dsv4.ops.core.context import current
from dsv4.parallel.fork_server import ForkServer
from dsv4.tools.doctor.device import steps, workers
from dsv4.tools.doctor.device.all_ops import check_ops, coverage, ordered_tasks, summarize
from dsv4.tools.doctor.device.machine import examine_machine, format_of
from dsv4.tools.doctor.device.ops import OpResult, drawn
from dsv4.tools.doctor.device.workers import WorkerPool, num_compilers, num_workers
from dsv4.tools.doctor.report import DoctorReport
from dsv4.tools.speed.model import shape_config
from tests.tools.doctor.fake_ops import FAKES

MODULE = "tests.tools.doctor.fake_ops"
NUM_CASES = 4 * 5  # of an op with four that are not empty, each with four harder ones


def check(*names: str, workers: int = 2, **options: Any) -> list[OpResult]:
    ops = {name: FAKES[name] for name in names}
    options = {"kernels": True, "worker_module": MODULE, **options}
    return check_ops("cpu", ops=ops, workers=workers, **options)


def without_times(results: list[OpResult]) -> list[OpResult]:
    return [replace(item, time_us=0.0, reference_us=0.0) for item in results]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of workers."""
    found: list[int] = []
    start = WorkerPool._start

    def _start(pool: WorkerPool, count: int) -> None:
        before = len(pool._workers)
        start(pool, count)
        found.extend(worker.pid for worker in pool._workers[before:])

    monkeypatch.setattr(WorkerPool, "_start", _start)
    return found


def all_ended(pids: list[int]) -> bool:
    server = ForkServer.of(MODULE)
    return all(server.status(pid, timeout=30.0) is not None for pid in pids)


def test_workers_find_what_one_process_finds(started: list[int]) -> None:
    names = ("linear", "router", "rms_norm")
    seen: list[tuple[int, int]] = []
    found = check(*names, progress=lambda done, total: seen.append((done, total)))
    assert without_times(found) == without_times(check(*names, workers=0))
    assert len(started) == 2
    assert all_ended(started)
    assert seen == [(done, 3 * NUM_CASES) for done in range(1, 3 * NUM_CASES + 1)]
    wrong = {(item.op, item.case.partition(",")[0]) for item in found if item.status == "wrong"}
    assert wrong == {("linear", "3 torch.bfloat16")}
    assert "too odd" in next(item.detail for item in found if item.status == "wrong")
    timed = {item.case for item in found if item.time_us}
    assert timed == {
        f"{size} torch.{dtype}" for size in (2, 3) for dtype in ("float32", "bfloat16")
    }


def test_a_worker_that_dies_is_named_and_the_others_go_on(started: list[int]) -> None:
    found = check("rope", "rms_norm", workers=1)
    assert len(started) == 2
    assert all_ended(started)
    [died] = [item for item in found if item.status == "wrong"]
    assert (died.op, died.case) == ("rope", "3 torch.bfloat16")
    assert died.detail == f"its process ended (signal 11, {signal.strsignal(11)})"
    left_out = [item for item in found if item.status == "skipped"]
    assert {(item.op, item.case.partition(",")[0]) for item in left_out} == {
        ("rope", "3 torch.bfloat16")
    }
    assert coverage(found).left_out == {"rope": 4}
    assert coverage(found).compared == 2 * NUM_CASES - 4
    report = DoctorReport(examine_machine("cpu"), found)
    assert not report.ok
    assert not report.is_complete
    assert "op rope (kernel), case 3 torch.bfloat16: its process" in report.conclusions()[0]


def test_a_kernel_that_never_ends(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of a report it is named among what was left out, else it is wrong."""
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.5)
    found = check("embed", seconds=1.5)
    [hung] = [item for item in found if item.ran == "kernel"]
    assert (hung.case, hung.status) == ("3 torch.bfloat16", "skipped")
    assert "still ran when time was over" in hung.detail
    monkeypatch.setattr(workers, "CASE_SECONDS", 1.0)
    [wrong] = [item for item in check("embed") if item.status == "wrong"]
    assert (wrong.case, wrong.detail) == ("3 torch.bfloat16", "did not end within 1 s")
    assert all_ended(started)


def test_an_interrupted_check_leaves_no_process(started: list[int]) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("embed", progress=interrupt)
    assert len(started) == 2
    assert all_ended(started)


def test_compiling_ahead_may_fail(started: list[int]) -> None:
    """Kernels that crash or hang while they compile are left to the workers that check them."""
    pytest.importorskip("triton", reason="the compiler is absent")
    setup = {"device": "cpu", "use_kernels": True, "kinds": ()}
    for name, seconds, wanted in (
        ("rms_norm", 60.0, True),
        ("rope", 60.0, False),
        ("embed", 2.0, False),
    ):
        tasks = ordered_tasks({name: FAKES[name]})
        end = time.monotonic() + workers.COMPILE_UNTIL + seconds
        assert WorkerPool(setup, MODULE).compile(tasks, 1, end) == wanted
    assert len(started) == 3
    assert all_ended(started)


def test_without_workers_one_process_checks(caplog: pytest.LogCaptureFixture) -> None:
    ops = {"rms_norm": FAKES["rms_norm"]}
    found = check_ops("nowhere", ops=ops, kernels=True, workers=2, worker_module=MODULE)
    assert "a worker cannot use nowhere" in caplog.text
    assert len(found) == NUM_CASES
    assert all("nowhere" in item.detail for item in found)


def test_a_limit_leaves_out_second_sizes_first() -> None:
    some = ("linear", "kv_store", "attention", "router", "experts")
    ops = {name: OPS[name] for name in some}
    tasks = ordered_tasks(ops)
    cases = {name: list(op.cases()) for name, op in ops.items()}
    labels = [(task.op, format_of(drawn(cases[task.op][task.place]))) for task in tasks]
    every = dict.fromkeys(labels)
    assert list(every) == labels[: len(every)]
    is_research = [label in ("float32", "fp32 entries") for _, label in every]
    assert is_research == sorted(is_research)
    assert {("experts", "nvfp4 x a16"), ("attention", "fp8 entries"), ("router", "bfloat16")} < {
        label for label, late in zip(every, is_research, strict=True) if not late
    }
    assert len(tasks) == len(set(tasks))
    empty = sum(map(len, cases.values())) - len(tasks)
    assert 0 < empty < 20


def test_cases_of_an_op_have_names_of_their_own() -> None:
    """Cases are counted by name."""
    for op in OPS.values():
        names = Counter(case.name for case in op.cases())
        assert not [name for name, count in names.items() if count > 1], op.name


def test_a_report_says_what_it_left_out() -> None:
    found = check("rms_norm", "router", workers=0, seconds=0.0)
    assert coverage(found).left_out == {"rms_norm": NUM_CASES, "router": NUM_CASES}
    report = DoctorReport(examine_machine("cpu"), found)
    assert report.ok
    assert report.verdict() == (
        "0 of 40 cases of ops checked, nothing wrong among them; --all checks the rest"
    )
    data = report.to_json()
    assert (data["ok"], data["complete"]) == (True, False)
    assert data["cases"]["total"] == 40
    whole = DoctorReport(report.machine, check("rms_norm", workers=0))
    assert whole.verdict() == "nothing is wrong: all 20 cases of ops checked"
    assert whole.to_json()["complete"] is True


def test_cases_of_the_reference_do_not_look_like_failures() -> None:
    found = check("router", "grouped_linear", workers=0)
    router, grouped = summarize(found)
    assert (router["ran"], router["status"], router["cases"]) == ("right", "ok", NUM_CASES)
    assert (grouped["ran"], grouped["status"], grouped["cases"]) == ("reference", "unsupported", 0)
    assert grouped["detail"] == "for the other kernel"
    assert coverage(found).by_reference == {"grouped_linear": NUM_CASES}
    assert coverage(found).compared == NUM_CASES


def test_number_of_workers() -> None:
    gb = 10**9
    assert num_workers(6, 166, 140 * gb, 120 * gb) == 6
    assert num_compilers(16, 120 * gb) == 16
    assert num_compilers(128, 1000 * gb) == workers.MOST_COMPILERS
    assert num_compilers(16, 1 * gb) == 1
    assert num_workers(192, 166, 140 * gb, 2000 * gb) == workers.MOST
    assert num_workers(2, 166, 20 * gb, 20 * gb) == 2
    assert num_workers(16, 166, 8 * gb, 60 * gb) == 4
    assert num_workers(16, 166, gb // 2, gb) == 1
    assert num_workers(16, 3, 140 * gb, 120 * gb) == 3


def test_steps_with_fusions_are_steps_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    small = shape_config("trial", None)
    layers = {item.name: getattr(small, item.name) for item in fields(small)}
    monkeypatch.setattr(steps, "LAYERS", layers)
    steps._model.cache_clear()
    ops = {"step": steps.STEP}
    kinds = [task.place for task in ordered_tasks(ops)]
    assert kinds == list(range(8))
    found = check_ops("cpu", ops=ops, kernels=True)
    assert {(item.ran, item.status) for item in found} == {("fused_step", "ok")}
    right = steps.forward

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        if current().observer is None:
            steps.logits_of(*arguments[2:])[0, 3] += 1e-5

    monkeypatch.setattr(steps, "forward", wrong)
    again = check_ops("cpu", ops=ops, kernels=True)
    steps._model.cache_clear()
    assert {item.case: item.status for item in again} == {
        item.case: "ok" if item.case.startswith("prompt") else "wrong" for item in found
    }
