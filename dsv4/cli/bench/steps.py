"""`dsv4 bench decode` and `dsv4 bench prefill`: whole steps on this machine."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.progress import StageStatus
from dsv4.errors import OptionError
from dsv4.util.output_paths import check_writable

if TYPE_CHECKING:
    from dsv4.tools.bench_ops import Ceilings
    from dsv4.tools.speed.steps import StepResult

SHAPE = typer.Option("flash", help="flash, pro, or trial: four small layers for any machine.")
LAYERS = typer.Option(0, min=0, help="Use only the first N layers; 0: flash 36, pro 9, trial all.")
DEVICE = typer.Option("cuda", help="cuda, or cpu for a trial through the references.")
RECORD = typer.Option(None, help="Write a JSONL record to this file.")
FITTING_LAYERS = {"flash": 36, "pro": 9}


def decode(
    shape: str = SHAPE,
    layers: int = LAYERS,
    batch: str = typer.Option("1,8,32,128", help="Sequences at once."),
    context: str = typer.Option("4096,131072,1048576", help="Tokens each of them has."),
    width: str = typer.Option("", help="Also verify steps: rows of each sequence, like 2,4,6."),
    routing: str = typer.Option(
        "random", help="Tokens of these rows: random, or the same; of experts: even,zipf:1.0."
    ),
    draft: str = typer.Option("", help="scripted:0.7: what they give at this acceptance."),
    expert_memory: str = typer.Option("", help="Not all experts on the GPU: auto, or GB,GB."),
    settle: int = typer.Option(2000, min=0, help="Steps in which they settle before timing."),
    prompt: str = typer.Option("", help="With --expert-memory, also prompts of so many tokens."),
    weights: str = typer.Option("", help="nvfp4 (default), official; sm_90: a8, auto."),
    device: str = DEVICE,
    compare: str = typer.Option("", help="'transformers': time its model too, 4 layers, batch 1."),
    record: Path | None = RECORD,
    plot: Path | None = typer.Option(None, help="Picture (SVG): the first result, or by share."),
    timeline: Path | None = typer.Option(None, help="Draw a layer's kernels over time (SVG)."),
) -> None:
    """Time decode steps, against the floor that their bytes set.

    Example: dsv4 bench decode --shape flash --batch 1,8 --context 4096
    """
    from dsv4.tools.speed.profile import LayerTrace, picture
    from dsv4.tools.speed.report import drafting_lines
    from dsv4.tools.speed.steps import bench_decode

    batches, contexts = numbers("batch", batch), numbers("context", context)
    others = {"width": width, "draft": draft, "compare": compare, "timeline": timeline}
    others["weights"] = "" if weights == "official" else weights
    _check_combined(expert_memory, others if expert_memory else {"prompt": prompt})
    if expert_memory:
        _check(shape, device)
        case: dict[str, Any] = {"shape": shape, "layers": layers or None, "device": device}
        case["cases"] = [(b, c) for c in contexts for b in batches]
        case["routings"] = ("even" if routing == "random" else routing).split(",")
        case |= {"prompts": numbers("prompt", prompt) if prompt else [], "settle": settle}
        _show_placed(case, expert_memory.split(","), record, plot)
        return
    weights = weights or "nvfp4"
    if compare not in ("", "transformers"):
        raise OptionError(f"compare is {compare!r}, expected 'transformers'")
    widths, accept = numbers("width", width, 2, 8) if width else [], _acceptance(draft)
    if routing not in ("random", "same"):
        raise OptionError(f"routing is {routing!r}, expected random or same")
    _check(shape, device, weights, timeline)
    chosen, same, traces = _layers(shape, layers), routing == "same", list[LayerTrace]()
    kept = traces if timeline else None
    rows = bench_decode(shape, chosen, batches, contexts, device, widths, same, kept, weights)
    total = len(batches) * len(contexts) * (1 + len(widths)) + 2 * bool(compare)
    more = _comparison(shape, device, weights) if compare else None
    seen = _show(rows, total, record, plot, more)
    lines = [f"{trace.title}: {trace.summary()}" for trace in traces]
    if timeline:
        timeline.write_text(picture(traces), encoding="utf-8")
    lines += [] if accept is None else drafting_lines(seen, accept)
    for line in lines:
        Console().print(line, highlight=False, soft_wrap=True)


def prefill(
    shape: str = SHAPE,
    layers: int = LAYERS,
    tokens: str = typer.Option("8192", help="Tokens of the prompt."),
    position: str = typer.Option("0", help="Tokens before these: a chunk of a longer prompt."),
    weights: str = typer.Option("nvfp4", help="nvfp4, official; on sm_90 a8, auto."),
    device: str = DEVICE,
    record: Path | None = RECORD,
    plot: Path | None = typer.Option(None, help="Picture (SVG): the first result, or by position."),
) -> None:
    """Time a prompt read in one step, against its floor.

    Examples: dsv4 bench prefill --tokens 8192; dsv4 bench prefill --tokens 8192 --position 100000
    """
    from dsv4.tools.speed.prompts import bench_prefill, check_chunks

    lengths, positions = numbers("tokens", tokens), numbers("position", position, 0)
    check_chunks(shape, max(lengths), max(positions))
    _check(shape, device, weights)
    rows = bench_prefill(shape, _layers(shape, layers), lengths, positions, device, weights)
    _show(rows, len(lengths) * len(positions), record, plot)


def _check_combined(expert_memory: str, others: dict[str, Any]) -> None:
    """`others`: options of steps with memory for all experts, or of those without."""
    how, do = ("with", "leave out one") if expert_memory else ("without", "use bench prefill")
    for name, value in others.items():
        if value:
            raise OptionError(f"{name} is '{value}', expected none {how} --expert-memory; {do}")


def _show_placed(
    case: dict[str, Any], sizes: list[str], record: Path | None, plot: Path | None
) -> None:
    """Steps when not all experts fit on the GPU, for each size of its expert memory."""
    from dsv4.tools.speed.expert_memory import bench_placed, exponent_of
    from dsv4.tools.speed.report import placed_line, share_picture, share_points, write_record

    check_writable(files=(record, plot))
    for routing in case["routings"]:
        exponent_of(routing)
    stage, rows = StageStatus(Console(stderr=True)), []
    for size in sizes:
        stage("making random weights")
        for row in bench_placed(**case, expert_memory=size):
            stage.pause()
            Console().print(placed_line(row), highlight=False, soft_wrap=True)
            rows.append(row)
            if record is not None:
                write_record(record, [asdict(row) for row in rows])
            stage("timing steps")
    stage.pause()
    if plot is not None:
        plot.write_text(share_picture(share_points(rows)), encoding="utf-8")


def _acceptance(draft: str) -> float | None:
    """The 0.7 of `scripted:0.7`."""
    if not draft:
        return None
    kind, _, text = draft.partition(":")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if kind != "scripted" or not 0 <= value <= 1:
        raise OptionError(f"draft is {draft!r}, expected scripted: and a chance, like scripted:0.7")
    return value


def _comparison(shape: str, device: str, weights: str) -> "Iterator[Ceilings | StepResult]":
    """Both models with the same few layers, one after the other in one process."""
    from dsv4.tools.speed.compare import transformers_ms
    from dsv4.tools.speed.model import shape_config
    from dsv4.tools.speed.steps import StepResult, bench_decode

    layers = min(4, shape_config(shape, None).num_layers)
    context = min(4096, shape_config(shape, None).max_positions)
    for ours in bench_decode(shape, layers, [1], [context], device, weights=weights):
        if isinstance(ours, StepResult):
            theirs = transformers_ms(shape_config(shape, layers), device)
            yield replace(ours, what="decode ours")
            ours = replace(ours, weights="bf16", ratio=round(theirs / ours.ms, 1))
            yield replace(ours, what="decode transformers", ms=round(theirs, 3))


def _show(
    rows: "Iterator[Ceilings | StepResult]",
    total: int,
    record: Path | None,
    plot: Path | None,
    more: "Iterator[Ceilings | StepResult] | None" = None,
) -> "list[Ceilings | StepResult]":
    from dsv4.tools.speed.report import lines_of, picture, position_picture, write_record
    from dsv4.tools.speed.steps import StepResult

    check_writable(files=(record, plot))
    console = Console()
    seen: list[Ceilings | StepResult] = []
    stage, done = StageStatus(Console(stderr=True)), 0
    stage("making random weights")
    for part in (rows, more or iter(())):
        for row in part:
            seen.append(row)
            done += isinstance(row, StepResult)
            stage.pause()
            if isinstance(row, StepResult):
                for line in lines_of(row):
                    console.print(line, highlight=False, soft_wrap=True)
            else:
                console.print(f"read {row.read_gbs:.0f} GB/s, bf16 {row.matrix_tflops:.0f} TFLOP/s")
            if record is not None:
                write_record(record, seen)  # after each row, so that an interrupted run is kept
            if done < total:
                stage("timing steps", done, total)
    stage.pause()
    results = [row for row in seen if isinstance(row, StepResult)]
    if plot is not None and results:
        by_position = any(row.position for row in results)
        drawn = position_picture(results) if by_position else picture(results[0])
        plot.write_text(drawn, encoding="utf-8")
    return seen


def numbers(name: str, text: str, least: int = 1, most: int | None = None) -> list[int]:
    try:
        numbers = [int(item) for item in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} {text!r}, expected numbers like 1,8,32") from None
    if min(numbers) < least or max(numbers) > (most or max(numbers)):
        wanted = f"from {least} to {most}" if most else f"of {least} or more"
        raise OptionError(f"{name} {text!r}, expected numbers {wanted}")
    return numbers


def _layers(shape: str, layers: int) -> int | None:
    return layers or FITTING_LAYERS.get(shape)


def _check(shape: str, device: str, weights: str = "nvfp4", timeline: Path | None = None) -> None:
    """Report errors that do not depend on the machine first."""
    import torch

    from dsv4.tools.speed.model import WEIGHTS, shape_config

    shape_config(shape, None)
    if weights not in WEIGHTS:
        raise OptionError(f"weights is {weights!r}, expected {', '.join(WEIGHTS)}")
    if timeline is not None and device == "cpu":
        raise OptionError("--timeline draws a GPU's kernels, and the device is cpu; use cuda")
    check_writable(files=(timeline,))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("no CUDA device was found; --device cpu --shape trial tries the tool out")
