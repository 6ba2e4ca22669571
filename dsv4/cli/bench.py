"""`dsv4 bench ops`: time the ops on this GPU."""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dsv4.errors import OptionError


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
    bench.command("ops")(ops)
    app.add_typer(bench, name="bench")


def ops(
    shape: list[str] = typer.Option(["flash", "pro"], help="Model whose sizes are used."),
    tokens: str = typer.Option("1,8,32,128,8192", help="Numbers of tokens."),
    only: str = typer.Option("", help="Only ops whose name contains this."),
    record: Path | None = typer.Option(None, help="Write a JSONL record to this file."),
) -> None:
    """Time every weight op: microseconds, GB/s, TFLOP/s, and the floor they could reach.

    Example: dsv4 bench ops --shape flash --only wq_b
    """
    from dsv4.tools.bench_ops import Ceilings, Result, bench_ops, write_record

    try:
        counts = [int(item) for item in tokens.split(",")]
    except ValueError:
        raise OptionError(f"tokens {tokens!r}, expected numbers like 1,8,32") from None
    console = Console()
    rows: list[Ceilings | Result] = []
    table = Table("op", "shape", "tokens", "us", "spread", "GB/s", "TFLOP/s", "floor us", "ratio")
    for row in bench_ops(shape, counts, only):
        rows.append(row)
        if isinstance(row, Ceilings):
            console.print(f"read {row.read_gbs:.0f} GB/s, bf16 {row.matrix_tflops:.0f} TFLOP/s")
            continue
        cells = (row.median_us, row.spread_us, row.gbs, row.tflops, row.floor_us, row.ratio)
        table.add_row(row.op, row.shape, str(row.tokens), *(f"{cell:g}" for cell in cells))
    console.print(table)
    if record is not None:
        write_record(record, rows)
        console.print(f"recorded in {record}")
