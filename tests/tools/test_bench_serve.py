"""`bench serve` on a model that answers in milliseconds: the trace, the figures, the record."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dsv4.tools.bench_serve
from dsv4 import Engine
from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.tools.bench_serve import (
    Timing,
    Workload,
    bench_batching,
    bench_prefix,
    bench_trace,
    make_trace,
    summarise,
)
from tests.models import write_quick_model

SMALL = Workload(4, 0, (4, 140), (2, 3), shared=0.8, num_prefixes=1, prefix_len=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quick_model(tmp_path_factory.mktemp("model"))


def maker(folder: Path) -> Any:
    def make(changes: dict[str, Any]) -> Engine:
        return Engine.load(folder, **{"device": "cpu", "max_context": 600, **changes})

    return make


def test_a_trace_is_a_function_of_its_seed() -> None:
    workload = Workload(num_requests=300, rate=4.0)
    first, again = (make_trace(workload, 100) for _ in range(2))
    assert first == again
    assert first != make_trace(Workload(num_requests=300, rate=4.0, seed=1), 100)
    assert [a.time_s for a in first] == sorted(a.time_s for a in first)
    assert first[-1].time_s == pytest.approx(300 / 4.0, rel=0.2)
    begins = [a.request.prompt_ids[:640] for a in first if len(a.request.prompt_ids) > 640]
    assert len(set(begins)) == 2
    assert len(begins) == pytest.approx(150, rel=0.2)


def test_figures() -> None:
    timings = [Timing(100, 50, 11, 0.1 * i, 0.1 * i + 1.0) for i in range(1, 101)]
    report = summarise("x", timings, 10.0, 0)
    assert report.tokens_per_s == 110.0
    assert report.hit_rate == 0.5
    assert report.first_token_ms == {"p50": 5100.0, "p95": 9500.0, "p99": 9900.0}
    assert set(report.per_token_ms.values()) == {100.0}


def test_every_variant_answers_the_same_trace(folder: Path) -> None:
    plain, single, cold = bench_trace(maker(folder), SMALL)
    assert [r.name for r in (plain, single, cold)] == [
        "as it is",
        "one at a time",
        "no prefix cache",
    ]
    assert plain.output_tokens == single.output_tokens == cold.output_tokens > 0
    assert plain.hit_rate > 0
    assert cold.hit_rate == 0


def test_gains(folder: Path) -> None:
    batching = bench_batching(maker(folder), batch=4, num_output=3, repeats=1)
    assert batching.with_it > batching.without > 0
    assert batching.ratio > 1
    prefix = bench_prefix(maker(folder), prefix_len=512, repeats=1)
    assert prefix.without > prefix.with_it > 0


def test_the_command_writes_a_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function, small in ((bench_batching, (2, 2, 1)), (bench_prefix, (128, 1))):
        short = functools.partial(lambda f, args, make, *_: f(make, *args), function, small)
        monkeypatch.setattr(dsv4.tools.bench_serve, function.__name__, short)
    record = tmp_path / "record.jsonl"
    options = ["--requests", "1", "--rate", "0", "--shared", "0", "--prefix", "999"]
    engine = ["--device", "cpu", "--max-context", "1000"]
    command = ["bench", "serve", str(folder), *options, *engine, "--record", str(record)]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["run", *["report"] * 3, *["gain"] * 2]
    assert lines[0]["run"]["workload"]["num_requests"] == 1
    assert "max_context=1000" in lines[0]["run"]["settings"]


def test_impossible_workloads() -> None:
    for bad in ({"num_requests": 0}, {"rate": -1.0}, {"shared": 2.0}):
        with pytest.raises(OptionError, match="expected"):
            Workload(**bad)
