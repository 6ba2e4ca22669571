"""`dsv4 bench serve`: a trace of requests, and what batching and the prefix cache buy."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from dsv4.cli.options import MODEL, load_engine
from dsv4.cli.progress import Stage
from dsv4.util.output import check_output

if TYPE_CHECKING:
    from dsv4.engine import Engine


def serve(
    model: str = MODEL,
    requests: int = typer.Option(24, min=1, help="Requests of the trace."),
    rate: float = typer.Option(2.0, min=0.0, help="Arrivals in a second; 0: all at once."),
    shared: float = typer.Option(0.5, min=0.0, max=1.0, help="Share with a common beginning."),
    prefix: int = typer.Option(4096, min=128, help="Tokens of the long prefix."),
    record: Path | None = typer.Option(None, help="Write a JSONL record to this file."),
    as_json: bool = typer.Option(False, "--json", help="JSON lines on standard output."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Replay a trace of requests: latency, throughput, cache hits.

    The same trace runs as it is, one sequence at a time, and without the prefix cache.

    Example: dsv4 bench serve --requests 16 --rate 1 --record serve.jsonl
    """
    from dsv4.tools.bench_serve import (
        VARIANTS,
        Gain,
        Report,
        Workload,
        bench_batching,
        bench_prefix,
        bench_trace,
        write_record,
    )

    check_output(files=(record,))
    console = Console(stderr=True)
    workload = Workload(num_requests=requests, rate=rate, shared=shared)

    rows: list[Report | Gain] = []
    with Stage(console) as stage:

        def make(changes: dict[str, Any]) -> "Engine":
            stage.pause()
            engine = load_engine(model, {**(choices or {}), **changes}, console)
            text = ", ".join(f"{name} {value}" for name, value in changes.items()) or "as it is"
            stage(f"measure {len(rows) + 1} of {len(VARIANTS) + 2}: {text}")
            return engine

        for report in bench_trace(make, workload):
            rows.append(report)
        rows.append(bench_batching(make))
        rows.append(bench_prefix(make, prefix))
        stage.pause()
    if as_json:
        sys.stdout.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    else:
        Console().print(_traces([row for row in rows if isinstance(row, Report)]))
        Console().print(_gains([row for row in rows if isinstance(row, Gain)]))
    if record is not None:
        settings = str(load_engine(model, choices or {}, console).settings)
        write_record(record, {"workload": asdict(workload), "settings": settings}, rows)
        console.print(f"recorded in {record}")


def _traces(reports: list[Any]) -> Table:
    table = Table("trace", "tokens/s", "hit rate", "first token ms p50/p95/p99", "per token ms")
    for row in reports:
        times = [
            " / ".join(f"{value:g}" for value in times.values())
            for times in (row.first_token_ms, row.per_token_ms)
        ]
        table.add_row(row.name, f"{row.tokens_per_s:g}", f"{row.hit_rate:.0%}", *times)
    return table


def _gains(gains: list[Any]) -> Table:
    table = Table("measure", "unit", "with it", "without", "ratio")
    for row in gains:
        table.add_row(row.name, row.unit, f"{row.with_it:g}", f"{row.without:g}", f"{row.ratio:g}x")
    return table
