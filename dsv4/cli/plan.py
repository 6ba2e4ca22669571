"""`dsv4 plan`: what fits on which GPUs."""

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.tools.plan import CONTEXTS, Machine, Plan, make_plan, subject_of
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text

SHAPES = ("flash", "pro")
_BAR = 30


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: str = typer.Argument(..., help="flash, pro, tiny, or a checkpoint folder."),
    gpus: int = typer.Option(8, help="Number of GPUs."),
    memory: float = typer.Option(141.0, help="GB (10^9 bytes) of each GPU."),
    weights: str | None = typer.Option(
        None, help="official, nvfp4, nvfp4-all, fp8, base or bf16; default: as stored."
    ),
    kv_format: str = typer.Option("fp8", help="fp8, bf16 or fp32."),
    index_format: str = typer.Option("fp8", help="fp4, fp8, bf16 or fp32."),
    chunk_tokens: int = typer.Option(4096, help="Prompt tokens in one step."),
    context: list[int] = typer.Option([], help="Contexts to try; may be given several times."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show what fits: bytes per GPU, and how many sequences.

    Exit code 1 when not even one sequence fits.

    Example: dsv4 plan pro --gpus 8 --memory 192 --weights nvfp4
    """
    folder = None if model in SHAPES else model_folder(model)
    result = make_plan(
        subject_of(model, weights, folder),
        Machine(gpus, int(memory * 1e9)),
        kv_format=kv_format,
        index_format=index_format,
        chunk_tokens=chunk_tokens,
        contexts=tuple(sorted(context)) or CONTEXTS,
    )
    if as_json:
        sys.stdout.write(json.dumps(result.to_json(), indent=2) + "\n")
    else:
        _print(result, Console())
    if not result.possible:
        raise typer.Exit(1)


def _print(result: Plan, console: Console) -> None:
    machine = result.machine
    console.print(
        f"[bold]{escape(result.model)}[/], {result.weights} weights: "
        f"{size_text(result.checkpoint_bytes)} on disk, "
        f"{size_text(result.backbone_bytes)} without the draft; "
        f"{machine.num_gpus} x {machine.gpu_bytes / 1e9:g} GB"
    )
    table = Table("per GPU", "bytes", "", title_justify="left")
    table.columns[1].justify = "right"

    def row(name: str, nbytes: int) -> None:
        filled = round(_BAR * max(nbytes, 0) / machine.gpu_bytes)
        table.add_row(name, size_text(nbytes), "█" * min(filled, _BAR))

    for group, nbytes in sorted(result.weight_bytes.items(), key=lambda item: -item[1]):
        row(f"weights: {group}", nbytes)
    for name, nbytes in result.buffer_bytes.items():
        row(f"buffers: {name}", nbytes)
    row("[bold]left for state[/]", result.free_bytes)
    console.print(table)
    console.print(
        f"state with kv {result.kv_format}, index {result.index_format}: "
        + ", ".join(f"{size:,.2f} B/token {kind}" for kind, size in result.token_bytes.items())
        + "; per sequence "
        + ", ".join(f"{size_text(size)} {name}" for name, size in result.fixed_bytes.items())
    )
    fits = Table("context", "one sequence", "sequences that fit")
    for column in fits.columns:
        column.justify = "right"
    for fit in result.fits:
        color = "green" if fit.sequences else "red"
        count = f"[{color}]{fit.sequences:,}[/]"
        fits.add_row(f"{fit.context:,}", size_text(fit.sequence_bytes), count)
    console.print(fits)
    for line in result.advice:
        console.print(f"[yellow]to make it fit:[/] {escape(line)}")
