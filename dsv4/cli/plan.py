"""`dsv4 plan`: what fits on a GPU."""

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.tools.plan import CONTEXTS, ONE_GPU, Plan, make_plan, planned_model
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text

SHAPES = ("flash", "pro")
_BAR = 30


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: str = typer.Argument(..., help="flash, pro, tiny, or a checkpoint folder."),
    users: int | None = typer.Option(None, min=1, help="Sequences that run at once."),
    context: list[int] = typer.Option(
        [], help="Tokens of each; without --users several may be given."
    ),
    memory: float = typer.Option(
        150.0, help="GB (10^9 bytes) that the GPU reports; an H200 has about 150."
    ),
    gpus: int = typer.Option(1, help="One in this version."),
    weights: str | None = typer.Option(
        None, help="official, nvfp4, nvfp4-all, fp8, base, bf16; default: as stored."
    ),
    kv_format: str = typer.Option("auto", help="auto, fp8, bf16 or fp32."),
    index_format: str = typer.Option("auto", help="auto, fp4, fp8, bf16 or fp32."),
    chunk_tokens: int | None = typer.Option(None, help="Prompt tokens in one step."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show what the engine does with a GPU, and how much fits.

    Exit code 1 when it could not start.

    Example: dsv4 plan flash --users 32 --context 100000 --memory 192
    """
    if gpus != 1:
        raise OptionError(f"gpus is {gpus}; {ONE_GPU}")
    if users is not None and len(context) > 1:
        raise OptionError(f"found {len(context)} contexts with --users, expected one")
    folder = None if model in SHAPES else model_folder(model)
    choices = EngineConfig(
        kv_format=kv_format,
        index_format=index_format,
        chunk_tokens=chunk_tokens,
        max_sequences=users,
        max_context=context[0] if users is not None and context else None,
    )
    result = make_plan(
        planned_model(model, weights, folder),
        int(memory * 1e9),
        choices,
        contexts=tuple(sorted(context)) or CONTEXTS,
    )
    if as_json:
        sys.stdout.write(json.dumps(result.to_json(), indent=2) + "\n")
    else:
        _print(result, Console())
    if not result.possible:
        raise typer.Exit(1)


def _print(result: Plan, console: Console) -> None:
    loaded = sum(result.weight_bytes.values())
    console.print(
        f"[bold]{escape(result.model)}[/], {result.weights} weights: "
        f"{size_text(result.checkpoint_bytes)} on disk, {size_text(loaded)} loaded (no draft); "
        f"one GPU of {result.gpu_bytes / 1e9:g} GB"
    )
    table = Table("on the GPU", "bytes", "", title_justify="left")
    table.columns[1].justify = "right"

    def row(name: str, nbytes: int) -> None:
        filled = round(_BAR * max(nbytes, 0) / result.gpu_bytes)
        table.add_row(name, size_text(nbytes), "█" * min(filled, _BAR))

    for group, nbytes in sorted(result.weight_bytes.items(), key=lambda item: -item[1]):
        row(f"weights: {group}", nbytes)
    row("kept free for a step", result.step_bytes)
    row("[bold]left for state[/]", result.free_bytes)
    console.print(table)
    console.print(
        "state: "
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
    if result.rank_bytes:
        shares = ", ".join(f"{size_text(n)} at tp {tp}" for tp, n in result.rank_bytes.items())
        console.print(f"weights of one of several ranks (no GPUs yet): {shares}", highlight=False)
    s = result.settings
    if s is not None:
        console.print(
            f"the engine would run {s.max_sequences} sequences of {s.max_context:,} tokens at once "
            f"in {size_text(result.state_bytes)} of state: --max-sequences {s.max_sequences} "
            f"--max-context {s.max_context} (kv {s.kv_format}, index {s.index_format}, "
            f"{s.chunk_tokens} prompt tokens a step)",
            highlight=False,
        )
    for line in result.advice:
        console.print(f"[yellow]it would not start:[/] {escape(line)}")
