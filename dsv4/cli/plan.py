"""`dsv4 plan`: what fits on a GPU, and how several share a model."""

import json
import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks.cluster import GPUS, LINKS, Cluster
from dsv4.runner.settings import Settings
from dsv4.tools.plan import CONTEXTS, Plan, PlannedModel, make_plan, planned_model
from dsv4.tools.plan_experts import lines_of
from dsv4.tools.speed.layouts import LayoutPlan, assumptions, plan_layouts
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text

SHAPES = ("flash", "pro")
_BAR = 30
_GPUS = ", ".join(GPUS) + ", or here: this machine's, as doctor measured it."


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    model: str = typer.Argument(..., help="flash, pro, tiny, or a checkpoint folder."),
    users: int | None = typer.Option(None, min=1, help="Sequences that run at once."),
    context: list[int] = typer.Option([], help="Tokens of each; without --users several."),
    memory: float | None = typer.Option(
        None, min=1, max=10000, help="GB (10^9 bytes) that a GPU reports; default: that of --gpu."
    ),
    gpus: int = typer.Option(1, min=1, help="GPUs, on all nodes together."),
    nodes: int = typer.Option(1, min=1, help="Machines that have them."),
    gpu: str = typer.Option("h200", help=_GPUS),
    link: str | None = typer.Option(
        None, help=", ".join(LINKS) + ": between the GPUs of a node; default: that of --gpu."
    ),
    tp: int | None = typer.Option(None, min=1, help="Show the ranks of this layout: tp,"),
    pp: int = typer.Option(1, min=1, help="and its stages."),
    experts: str = typer.Option("whole", help="Of a rank: whole ones, or split: a part of each."),
    attention: str = typer.Option("tp", help="Of a rank: some heads (tp), or sequences (dp)."),
    comm: str = typer.Option("auto", help="Between ranks: auto, symmetric or nccl."),
    weights: str | None = typer.Option(
        None, help="official, nvfp4, nvfp4-all, fp8, base, bf16; default: as stored."
    ),
    kv_format: str = typer.Option("auto", help="auto, fp8, bf16 or fp32."),
    index_format: str = typer.Option("auto", help="auto, fp4, fp8, bf16 or fp32."),
    chunk_tokens: int | None = typer.Option(None, help="Prompt tokens in one step."),
    expert_memory: str = typer.Option("auto", help="Experts on a single GPU: auto, all, or GB."),
    host_memory: float | None = typer.Option(None, min=0, help="GB for the others; else enough."),
    zipf: float = typer.Option(1.0, min=0, max=10, help="Skew of routing to predict times for."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show what the engine does with a GPU, and how much fits.

    With several GPUs: the layouts that fit, their predicted speed, and which one to run. Exit
    code 1 when the engine could not start.

    Examples: dsv4 plan flash --gpu b200 --users 32 --context 100000;
    dsv4 plan pro --gpus 16 --nodes 2 --gpu h100
    """
    folder = None if model in SHAPES else model_folder(model, *SHAPES)
    texts: dict[str, Any] = {"kv_format": kv_format, "index_format": index_format}
    texts |= {"experts": experts, "attention": attention, "comm": comm}  # EngineConfig checks them
    choices = EngineConfig(
        **texts,
        chunk_tokens=chunk_tokens,
        max_sequences=users,
        max_context=context[0] if users is not None and context else None,
        expert_memory=expert_memory,
        tp="auto" if tp is None and pp == 1 else tp or 1,
        pp=pp,
    )
    cluster = Cluster.of(gpu, gpus, nodes, None if memory is None else int(memory * 1e9), link)
    subject = planned_model(model, weights, folder)
    _check_contexts(context, users, gpus, subject.config.max_positions)
    if gpus > 1:
        _show(plan_layouts(subject, cluster, choices), as_json=as_json)
        return
    contexts = tuple(sorted(context)) or CONTEXTS
    _show(_on_one(subject, cluster, choices, contexts, gpu, host_memory, zipf), as_json=as_json)


def _check_contexts(contexts: list[int], users: int | None, gpus: int, longest: int) -> None:
    if users is not None and len(contexts) > 1:
        raise OptionError(f"found {len(contexts)} contexts with --users, expected one")
    if contexts and max(contexts) > longest:
        raise OptionError(f"context is {max(contexts)}, the model's limit is {longest} tokens")
    if gpus > 1 and contexts and users is None:
        raise OptionError(f"gpus is {gpus} and users is missing; --context needs --users here")


def _on_one(
    subject: PlannedModel, cluster: Cluster, choices: EngineConfig, contexts: tuple[int, ...],
    gpu: str, host_memory: float | None, zipf: float,
) -> Plan:  # fmt: skip
    if choices.attention == "dp":
        raise OptionError("attention is 'dp', gpus is 1; give --gpus, expected several")
    if choices.world > 1:
        RankLayout(1 if choices.tp == "auto" else choices.tp).check(subject.config)
        raise OptionError(f"tp x pp is {choices.world}, gpus is 1; give --gpus {choices.world}")
    host_bytes = None if host_memory is None else int(host_memory * 1e9)
    return make_plan(
        subject, cluster.memory, choices, contexts=contexts, gpu=gpu, host_bytes=host_bytes,
        zipf=zipf,
    )  # fmt: skip


def _show(result: Plan | LayoutPlan, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result.to_json(), indent=2) + "\n")
    elif isinstance(result, Plan):
        _print(result, Console())
    else:
        _print_layouts(result, Console())
    if result.settings is None:
        raise typer.Exit(1)


def _print(result: Plan, console: Console) -> None:
    loaded = sum(result.weight_bytes.values())
    console.print(
        f"[bold]{escape(result.model)}[/], {result.weights} weights: "
        f"{size_text(result.checkpoint_bytes)} on disk, {size_text(loaded)} loaded; "
        f"one {result.gpu} of {result.gpu_bytes / 1e9:g} GB"
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
        + ", ".join(f"{size:,.6g} B/token {kind}" for kind, size in result.token_bytes.items())
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
    _print_settings(result.settings, result.state_bytes, "", console)
    times = result.experts or result.times
    if times is not None:
        console.print(*lines_of(times), sep="\n", highlight=False)
    for line in result.advice:
        console.print(f"[yellow]it would not start:[/] {escape(line)}")


def _print_settings(s: Settings | None, state_bytes: int, where: str, console: Console) -> None:
    if s is not None:
        console.print(
            f"the engine would run {s.max_sequences} sequences of {s.max_context:,} tokens at once "
            f"in {size_text(state_bytes)} of state{where}: --max-sequences {s.max_sequences} "
            f"--max-context {s.max_context} (kv {s.kv_format}, index {s.index_format}, "
            f"{s.chunk_tokens} prompt tokens a step)",
            highlight=False,
        )


def _print_layouts(result: LayoutPlan, console: Console) -> None:
    cluster = result.cluster
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    homes = ", attention dp" if result.forecasts[0].homes > 1 else ""
    console.print(
        f"[bold]{escape(result.model)}[/], {result.weights} weights, on {cluster.gpus} "
        f"{cluster.gpu.name} of {cluster.memory / 1e9:g} GB{nodes}, {cluster.link.name}{homes}"
    )
    batches = list(result.forecasts[0].steps)
    rows = list(zip(result.forecasts, result.fits, strict=True))
    shown = [row for row in rows if row[0].fits] or rows
    lengths = [f"x {_length(n)}" for n in result.fits[0]]
    table = Table(
        "tp", "pp", "GB", "KV", *lengths, *(f"batch {n}" for n in batches), "8k", "",
        caption="GB of weights a GPU; tokens of state; sequences of a length; ms of a step, of 8k",
    )  # fmt: skip
    for column in table.columns[:-1]:
        column.justify = "right"
    for found, fits in shown:
        is_best = (found.tp, found.pp) == result.recommended
        held = max(stage.weight_bytes for stage in found.stages)
        note = "[bold green]use[/]" if is_best else "" if found.fits else "[red]no room[/]"
        times = [f"{found.steps[n].total:.1f}" for n in batches]
        table.add_row(
            str(found.tp),
            str(found.pp),
            f"{held / 1e9:.1f}",
            f"{found.kv_tokens / 1e6:.2f}M",
            *map(str, fits.values()),
            *times,
            f"{found.prompt_ms:.0f}",
            note,
        )
    console.print(table)
    if result.recommended is not None:
        best = "tp {}, pp {}: ".format(*result.recommended)
        console.print(f"use {best}{escape(result.reason)}", highlight=False, soft_wrap=True)
    else:
        console.print(escape(result.reason), highlight=False, soft_wrap=True)
    _print_ledger(result, console)
    _print_settings(result.settings, result.state_bytes, " a rank", console)
    if result.settings is None:
        console.print("[yellow]it would not start[/]")
    else:
        lines = ["start it:", *result.commands]
        console.print(*lines, sep="\n  ", highlight=False, soft_wrap=True)
    lines = ["predicted, not run:", *assumptions(cluster)]
    console.print(*lines, sep="\n  ", highlight=False, soft_wrap=True)


def _length(tokens: int) -> str:
    """ "1M", "128k", "100,000"."""
    if tokens % 1024:
        return f"{tokens:,}"
    return f"{tokens >> 10}k" if tokens % (1 << 20) else f"{tokens >> 20}M"


def _print_ledger(result: LayoutPlan, console: Console) -> None:
    """What one rank of each stage holds."""
    tp, pp = result.shown
    ledger = Table(f"one rank of tp {tp}, pp {pp}", *(f"stage {i}" for i in range(pp)))
    for column in ledger.columns[1:]:
        column.justify = "right"
    spans = [stage.layers for stage in result.stages]
    rows = {"layers": [f"{first}-{stop - 1}" for first, stop in spans]}
    groups = {group for stage in result.stages for group in stage.weight_bytes}
    for group in sorted(groups, key=lambda g: -result.stages[0].weight_bytes.get(g, 0)):
        rows[f"weights: {group}"] = [size_text(s.weight_bytes.get(group, 0)) for s in result.stages]
    for label, name in (
        ("  of these: shared by ranks", "shared_bytes"),
        ("for exchanges", "exchange_bytes"),
        ("kept free for a step", "step_bytes"),
        ("left for state", "free_bytes"),
    ):
        rows[label] = [size_text(getattr(stage, name)) for stage in result.stages]
    rows["state per token"] = [f"{stage.token_bytes:,.0f} B" for stage in result.stages]
    rows["state per sequence"] = [size_text(stage.sequence_bytes) for stage in result.stages]
    for label, cells in rows.items():
        ledger.add_row(label, *cells)
    console.print(ledger)
