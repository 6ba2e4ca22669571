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
PLOT = typer.Option(None, help="Write a picture (SVG) of the first result to this file.")
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
    prompt: str = typer.Option("", help="Then also prompts of so many tokens."),
    device: str = DEVICE,
    compare: str = typer.Option("", help="'transformers': time its model too, 4 layers, batch 1."),
    record: Path | None = RECORD,
    plot: Path | None = PLOT,
    timeline: Path | None = typer.Option(None, help="Draw a layer's kernels over time (SVG)."),
) -> None:
    """Time decode steps, against the floor that their bytes set.

    Example: dsv4 bench decode --shape flash --batch 1,8 --context 4096
    """
    from dsv4.tools.speed.profile import LayerTrace, picture
    from dsv4.tools.speed.steps import bench_decode

    batches, contexts = numbers("batch", batch), numbers("context", context)
    if expert_memory:
        _check(shape, device)
        prompts = numbers("prompt", prompt) if prompt else []
        given = "even" if routing == "random" else routing
        case: dict[str, Any] = {"shape": shape, "layers": layers or None, "prompts": prompts}
        case["cases"] = [(b, c) for c in contexts for b in batches]
        case |= {"routings": given.split(","), "settle": settle, "device": device}
        _show_placed(case, expert_memory.split(","), record, plot)
        return
    if compare not in ("", "transformers"):
        raise OptionError(f"compare is {compare!r}, expected 'transformers'")
    widths, acceptance = numbers("width", width) if width else [], _acceptance(draft)
    if any(not 2 <= w <= 8 for w in widths):
        raise OptionError(f"width {width!r}, expected numbers from 2 to 8")
    if routing not in ("random", "same"):
        raise OptionError(f"routing is {routing!r}, expected random or same")
    _check(shape, device)
    _check_timeline(timeline, device)
    chosen, same, traces = _layers(shape, layers), routing == "same", list[LayerTrace]()
    kept = None if timeline is None else traces
    rows = bench_decode(shape, chosen, batches, contexts, device, widths, same, kept)
    total = len(batches) * len(contexts) * (1 + len(widths)) + 2 * bool(compare)
    seen = _show(rows, total, record, plot, _comparison(shape, device) if compare else None)
    lines = [f"{trace.title}: {trace.summary()}" for trace in traces]
    if timeline is not None:
        timeline.write_text(picture(traces), encoding="utf-8")
    if acceptance is not None:
        from dsv4.tools.speed.report import drafting_lines

        lines += drafting_lines(seen, acceptance)
    for line in lines:
        Console().print(line, highlight=False, soft_wrap=True)


def _check_timeline(timeline: Path | None, device: str) -> None:
    if timeline is not None and device == "cpu":
        raise OptionError("--timeline draws a GPU's kernels, and the device is cpu; use cuda")
    check_writable(files=(timeline,))


def prefill(
    shape: str = SHAPE,
    layers: int = LAYERS,
    tokens: str = typer.Option("8192", help="Tokens of the prompt."),
    device: str = DEVICE,
    record: Path | None = RECORD,
    plot: Path | None = PLOT,
) -> None:
    """Time a prompt read in one step, against its floor.

    Example: dsv4 bench prefill --shape flash --tokens 8192
    """
    from dsv4.tools.speed.steps import bench_prefill

    lengths = numbers("tokens", tokens)
    _check(shape, device)
    rows = bench_prefill(shape, _layers(shape, layers), lengths, device)
    _show(rows, len(lengths), record, plot)


def _show_placed(
    case: dict[str, Any], sizes: list[str], record: Path | None, plot: Path | None
) -> None:
    """Steps when not all experts fit on the GPU, for each size of its expert memory."""
    from dsv4.tools.speed.placed import bench_placed, exponent_of
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


def _comparison(shape: str, device: str) -> "Iterator[Ceilings | StepResult]":
    """Both models with the same few layers, one after the other in one process."""
    from dsv4.tools.speed.compare import transformers_ms
    from dsv4.tools.speed.model import shape_config
    from dsv4.tools.speed.steps import StepResult, bench_decode

    layers = min(4, shape_config(shape, None).num_layers)
    context = min(4096, shape_config(shape, None).max_positions)
    for ours in bench_decode(shape, layers, [1], [context], device):
        if isinstance(ours, StepResult):
            theirs = transformers_ms(shape_config(shape, layers), device)
            yield replace(ours, what="decode ours")
            ratio = round(theirs / ours.ms, 1)
            yield replace(ours, what="decode transformers", ms=round(theirs, 3), ratio=ratio)


def _show(
    rows: "Iterator[Ceilings | StepResult]",
    total: int,
    record: Path | None,
    plot: Path | None,
    more: "Iterator[Ceilings | StepResult] | None" = None,
) -> "list[Ceilings | StepResult]":
    from dsv4.tools.speed.report import lines_of, picture, write_record
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
    first = next((row for row in seen if isinstance(row, StepResult)), None)
    if plot is not None and first is not None:
        plot.write_text(picture(first), encoding="utf-8")
    return seen


def numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(item) for item in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} {text!r}, expected numbers like 1,8,32") from None
    if min(numbers) < 1:
        raise OptionError(f"{name} {text!r}, expected numbers above 0")
    return numbers


def _layers(shape: str, layers: int) -> int | None:
    return layers or FITTING_LAYERS.get(shape)


def _check(shape: str, device: str) -> None:
    """Report errors that do not depend on the machine first."""
    import torch

    from dsv4.tools.speed.model import shape_config

    shape_config(shape, None)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("no CUDA device was found; --device cpu --shape trial tries the tool out")
