"""`dsv4 convert`: the same model in another number format."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.cli.progress import ProgressBar
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text

if TYPE_CHECKING:
    from dsv4.tools.convert.convert import Conversion


def register(app: typer.Typer) -> None:
    app.command("convert")(convert)


def convert(
    source: str = typer.Argument(..., help="The checkpoint to read."),
    destination: Path = typer.Argument(..., help="An empty or new folder."),
    to: str = typer.Option("nvfp4", help="nvfp4 (experts), nvfp4-all, official, fp8 or bf16."),
    scales: str = typer.Option("max", help="For NVFP4: max, four-over-six or mse."),
    shard_size: float = typer.Option(5.0, help="GB (10^9 bytes) of one file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Convert a checkpoint to another number format.

    Official MXFP4 experts become NVFP4 bit for bit.

    A conversion that was interrupted goes on when the same command is given again.

    Example: dsv4 convert ./DeepSeek-V4-Flash ./Flash-NVFP4 --to nvfp4
    """
    from dsv4.tools.convert import convert as tool

    with ProgressBar(Console(stderr=True), "converting") as progress:
        result = tool.convert(
            model_folder(source),
            destination,
            cast(Any, to),
            scales=cast(Any, scales),
            shard_bytes=int(shard_size * 1e9),
            progress=progress,
        )
    if as_json:
        sys.stdout.write(json.dumps(result.to_json(), indent=2) + "\n")
    else:
        _print(result, destination, Console())


def _print(result: "Conversion", destination: Path, console: Console) -> None:
    table = Table("group", "matrices", "exact", "relative RMS", "cosine")
    for name, stats in result.groups.items():
        table.add_row(
            name,
            f"{stats.matrices:,}",
            f"{stats.exact:,}",
            "0" if stats.error == 0 else f"{stats.relative_rms:.3%}",
            f"{stats.cosine:.6f}",
        )
    console.print(table)
    worst = sorted(result.inexact.items(), key=lambda item: -item[1])[:5]
    for name, rms in worst:
        console.print(f"largest differences: {escape(name)} {rms:.3%}")
    if not result.inexact:
        console.print("[green]every tensor is exact[/]")
    made_up = sum(stats.uncalibrated for stats in result.groups.values())
    if made_up:
        console.print(
            f"{made_up:,} matrices had no input_scale: 1.0 was written (harmless, uncalibrated)"
        )
    if result.dropped:
        console.print(f"{result.dropped:,} draft tensors were left out: the layout has none")
    console.print(
        f"{escape(str(destination))}: {result.num_shards} files, {size_text(result.nbytes)}"
        + (f", {result.resumed} from an earlier run" if result.resumed else "")
    )
