"""`dsv4 bench`: speed and quality measurements."""

import json
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dsv4.cli.bench.parallel import parallel
from dsv4.cli.bench.serve import serve
from dsv4.cli.bench.steps import decode, numbers, prefill
from dsv4.cli.options import MODEL, engine_options, load_engine
from dsv4.cli.progress import StageStatus
from dsv4.errors import OptionError
from dsv4.util.output_paths import check_writable


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure speed and quality.", no_args_is_help=True)
    bench.command("ops")(ops)
    bench.command("decode")(decode)
    bench.command("prefill")(prefill)
    bench.command("serve")(engine_options(serve))
    bench.command("parallel")(parallel)
    bench.command("quality")(engine_options(quality))
    app.add_typer(bench, name="bench")


def ops(
    shape: list[str] = typer.Option(["flash", "pro"], help="Model whose sizes are used."),
    tokens: str = typer.Option("1,8,32,128,8192", help="Numbers of tokens."),
    only: str = typer.Option("", help="Only ops whose name contains this."),
    predict: str = typer.Option("", help="Run nothing: floors of a GPU, such as a100."),
    record: Path | None = typer.Option(None, help="Write a JSONL record to this file."),
) -> None:
    """Time every weight op, against the floor it could reach.

    Examples: dsv4 bench ops --shape flash --only wq_b; dsv4 bench ops --predict b200
    """
    from dsv4.tools.bench_ops import Ceilings, Result, bench_ops, num_results, write_record

    counts = numbers("tokens", tokens)
    check_writable(files=(record,))
    console = Console()
    if predict:
        _predict(predict, shape, counts, only, record, console)
        return
    rows: list[Ceilings | Result] = []
    table: list[tuple[str, ...]] = []
    stage, total = StageStatus(Console(stderr=True)), num_results(shape, counts, only)
    for row in bench_ops(shape, counts, only):
        rows.append(row)
        if record is not None:
            write_record(record, rows)  # after each row, so that an interrupted run is kept
        if isinstance(row, Ceilings):
            console.print(f"read {row.read_gbs:.0f} GB/s, bf16 {row.matrix_tflops:.0f} TFLOP/s")
            stage("timing ops", 0, total)
            continue
        text = f"timed {row.op} of {row.shape} with {row.tokens} tokens"
        stage(text, len(rows) - 1, total)
        cells = (row.median_us, row.spread_us, row.gbs, row.tflops, row.floor_us, row.ratio)
        heading = f"{row.shape}, {row.tokens} tokens"
        table.append((heading, row.op, *(f"{cell:g}" for cell in cells)))
    stage.pause()
    _print_rows(console, "op,us,spread,GB/s,TFLOP/s,floor us,ratio", table)
    if record is not None:
        console.print(f"recorded in {record}")


def _print_rows(console: Console, columns: str, rows: list[tuple[str, ...]]) -> None:
    """Aligned text of at most 80 columns, with a heading per shape and token count.

    The first cell of a row is that heading; names are left-aligned, figures right-aligned.
    """
    names = tuple(columns.split(","))
    cells = [names, *(row[1:] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def show(row: tuple[str, ...]) -> None:
        figures = zip(row[1:], widths[1:], strict=True)
        line = " ".join([row[0].ljust(widths[0]), *(text.rjust(size) for text, size in figures)])
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for heading in dict.fromkeys(row[0] for row in rows):
        console.print(f"\n{heading}", style="bold", highlight=False)
        show(names)
        for row in rows:
            if row[0] == heading:
                show(row[1:])


def _predict(
    gpu: str, shapes: list[str], tokens: list[int], only: str, record: Path | None, console: Console
) -> None:
    from dsv4.runner.ranks.cluster import HERE, gpu_rates
    from dsv4.tools.predict import MEASURED_HERE, SOURCE, measured_ops, to_json
    from dsv4.tools.predict import predict as predicted

    rows = list(predicted(gpu, shapes, tokens, only))
    chip, found = gpu_rates(gpu, "predict"), measured_ops()[0]
    rates = ", ".join(f"a{bits} {chip.rate(bits):g}" for bits in (16, 8, 4))
    console.print(
        f"[bold]{chip.name}: predicted, not run[/]. {chip.read_gbs:g} GB/s, TFLOP/s {rates} "
        f"({MEASURED_HERE if gpu == HERE else SOURCE}). H200: {found}.",
        soft_wrap=True,
    )
    table = []
    for row in rows:
        cells = [f"{row.bytes / 1e6:.4g}", f"{row.operations / 1e9:.3g}", str(row.launches)]
        cells += [f"{row.floor_us[width]:.4g}" for width in ("a16", "a8", "a4")]
        measured = "" if row.measured_us is None else f"{row.measured_us:g}"
        heading = f"{row.shape}, {row.tokens} tokens: floors in us by width of the activations"
        table.append((heading, row.op, *cells, row.bound.split()[0], measured))
    _print_rows(console, "op,MB,GFLOP,launches,a16,a8,a4,bound,H200 us", table)
    if record is not None:
        record.write_text("\n".join(to_json(rows, gpu)) + "\n", encoding="utf-8")
        console.print(f"recorded in {record}")


def quality(
    model: str = MODEL,
    count: int = typer.Option(200, min=1, help="Most prompts of each skill."),
    skills: str = typer.Option("", help="Only these, separated by commas; all if empty."),
    lengths: str = typer.Option("2000,8000,16000", help="Tokens to search through; '' for none."),
    variant: str = typer.Option("", help="Break this part of the model on purpose."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
    record: Path | None = typer.Option(None, help="Write a JSONL record to this file."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Accuracy by skill on held-out prompts, and perplexity. With a drafter named (--draft mtp),
    also how many of its drafts are accepted; every draft is verified, whatever that costs.

    Example: dsv4 bench quality --count 20 --lengths 2000 --kv-format fp8
    """
    from dsv4.tools.quality.drafts import QualityRecord
    from dsv4.tools.quality.measure import Score, measure, num_scores, perplexity, read_items
    from dsv4.tools.quality.variants import broken

    try:
        sizes = [int(item) for item in lengths.split(",") if item]
    except ValueError:
        raise OptionError(f"lengths {lengths!r}, expected numbers like 2000,8000") from None
    items = read_items(model)
    unknown = set(filter(None, skills.split(","))) - set(items)
    if unknown:
        raise OptionError(f"skills names {min(unknown)!r}; the model has {', '.join(items)}")
    if skills:
        items = {name: items[name] for name in skills.split(",")}
    check_writable(files=(record,))
    console = Console(stderr=True)
    engine = load_engine(model, choices or {}, console)
    found = QualityRecord(engine, (choices or {}).get("draft", "auto"))
    total, done = num_scores(items, sizes) + 1, 0  # perplexity comes last

    def show(score: Score) -> None:
        nonlocal done
        done += 1
        stage(f"asked {score.skill}", done, total)
        text = found.add(score)
        if not as_json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        for wrong in score.wrong:
            console.print(f"  {wrong}", highlight=False, markup=False)

    with broken(engine, variant), StageStatus(console) as stage:
        stage(f"asking up to {count} questions of each skill: {', '.join(items)}", 0, total)
        measure(engine, items, count, sizes, show)
        stage("reading held-out stories", done, total)
        surprise = perplexity(engine)
    if record is not None:
        found.write(record, surprise)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(surprise)) + "\n")
    else:
        sys.stdout.write(f"perplexity: {surprise:.3f}\n")
