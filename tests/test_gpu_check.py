"""`scripts/gpu_check.py` without a GPU: time on one is not to be lost to a misspelt option."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli import app
from scripts import gpu_check
from scripts.gpu_jobs import PART_LIMIT_S, PARTS, ROOT, Job, Place, stages_of

# What a command starts once it has read its options.
WORK = {
    "decode": "dsv4.tools.speed.steps.bench_decode",
    "decode placed": "dsv4.tools.speed.expert_memory.bench_placed",
    "prefill": "dsv4.tools.speed.prompts.bench_prefill",
    "ops": "dsv4.tools.bench_ops.bench_ops",
    "parallel": "dsv4.tools.speed.slices.measure_slices",
    "quality": "dsv4.cli.bench.load_engine",
}


def all_jobs(place: Place) -> list[Job]:
    return [job for part in PARTS for stage in stages_of(part, place) for job in stage]


@pytest.mark.parametrize("small", [False, True])
def test_commands_are_understood(
    small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = set()

    def start(name: str) -> Any:
        def begin(*_: Any, **__: Any) -> None:
            started.add(name)
            raise Begun

        return begin

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for name, path in WORK.items():
        monkeypatch.setattr(path, start(name))
    for job in all_jobs(Place(tmp_path, small)):
        first, *rest = job.arguments
        if first == "scripts/gpu_check.py":
            gpu_check.make_parser().parse_args(rest)
        elif first.startswith("benchmarks/"):
            if first != "benchmarks/draft_speed.py":  # kernels stand beside their options
                pytest.importorskip("triton", reason="the compiler is absent")
            script = import_module(first.removesuffix(".py").replace("/", "."))
            script.make_parser().parse_args(rest)
        elif rest[0] == "dsv4":
            result = CliRunner().invoke(app, rest[1:])
            assert isinstance(result.exception, Begun), (job.label, result.output)
        else:
            assert rest[0] == "pytest", job.label
    assert started == set(WORK) - ({"ops"} if small else set())


class Begun(Exception):
    """A command has read its options and would now measure."""


def test_pytest_finds_tests_for_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where plugins are copied without what names them: `pack` copies no metadata."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    seen = set()
    for job in all_jobs(Place(tmp_path)):
        if job.arguments[:2] != ["-m", "pytest"] or tuple(job.arguments) in seen:
            continue
        seen.add(tuple(job.arguments))
        counter = Counter()
        quick = ["--collect-only", "-qq", "-p", "no:unraisableexception"]  # which collects garbage
        code = pytest.main([*job.arguments[2:], *quick], plugins=[counter])
        assert code == 0, job.label
        assert counter.count > 0, job.label
    assert "pytest_timeout" in gpu_check.PURE


class Counter:
    count = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count = len(session.items)


def test_a_part_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job fails, one runs out of time with a child of its own, one comes too late."""
    stuck = (
        "import subprocess, sys, time; print('begun'); sys.stdout.flush();"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    jobs = [
        Job("fails", ["-c", "print('a line'); raise SystemExit(3)"], 30.0),
        Job("stuck", ["-c", stuck], 1.0),
        Job("late", ["-c", "print('never')"], 30.0),
    ]
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.5)
    monkeypatch.setattr(gpu_check, "PART_LIMIT_S", 1.2)
    monkeypatch.setattr(gpu_check, "stages_of", lambda *_: [jobs[:2], jobs[2:]])
    assert gpu_check.run_parts(["tests"], Place(tmp_path)) == 1
    text = (tmp_path / "log.txt").read_text()
    for line in ("[fails] a line", "[fails] exit 3", "[stuck] begun", "[stuck] out of time"):
        assert line in text
    assert "[late] not started" in text
    assert "never" not in text


def test_two_trees_are_compared_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "ROUNDS", tmp_path / "rounds")
    (tmp_path / "rounds").mkdir()
    for tree, number, ms in (("this", 1, 9.0), ("this", 2, 9.2), ("other", 1, 10.0)):
        result = {"what": "decode", "batch": 8, "context": 4096, "ms": ms}
        lines = [{"run": {"gpu": "none"}}, {"result": result}]
        if tree == "this":
            lines.append({"result": result | {"batch": 32}})
        path = tmp_path / "rounds" / f"{tree} decode {number}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = gpu_check.collect_rounds()
    assert gpu_check.differences(rows) == [
        "decode 8 x 4096: this 9.1000 ms, other 10.0000 ms, -9.00 %; rounds differ by 2.22 %",
        "decode 32 x 4096: only of this",
    ]
    written = [json.loads(line) for line in (tmp_path / "beside.jsonl").read_text().splitlines()]
    assert written == rows
    assert {(row["tree"], row["round"]) for row in rows} == {("this", 1), ("this", 2), ("other", 1)}


def test_limits_fit_ten_minutes(tmp_path: Path) -> None:
    place = Place(tmp_path, beside=tmp_path)
    assert PART_LIMIT_S < 600
    assert all(job.limit_s <= PART_LIMIT_S for job in all_jobs(place))
    trees = [job.tree for stage in stages_of("beside", place) for job in stage]
    assert trees == [ROOT, tmp_path, ROOT, tmp_path, tmp_path, ROOT, tmp_path, ROOT]
