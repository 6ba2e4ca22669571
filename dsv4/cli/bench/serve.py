"""`dsv4 bench serve`: open-loop traffic with random arrival times."""

import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.options import MODEL, load_engine
from dsv4.cli.progress import ProgressBar, StageStatus
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.util.models import model_folder
from dsv4.util.output_paths import check_writable

if TYPE_CHECKING:
    from dsv4.engine import Engine
    from dsv4.tools.speed.serving.http import Share
    from dsv4.tools.speed.serving.serve import IdleLatency, Measured, Ready, Warnings
    from dsv4.tools.speed.serving.traffic import LoadResult

    Row = Ready | IdleLatency | LoadResult | Warnings | Share

FITTING_LAYERS = {"flash": 24, "pro": 6}
MAX_CONTEXT, MAX_SEQUENCES = 8192, 64


def serve(
    model: str = MODEL,
    shape: str = typer.Option("", help="Random weights instead: flash, pro or trial."),
    layers: int = typer.Option(0, min=0, help="Of the shape; 0: flash 24, pro 6, trial all."),
    load: list[str] = typer.Option(
        [], help="Own load, e.g. rate=8,requests=48,in=512,out=64; also shared=256, odd=1."
    ),
    http: bool = typer.Option(False, "--http", help="Also through the server; 32 streams."),
    record: Path | None = typer.Option(None, help="Write a JSONL record to this file."),
    plot: Path | None = typer.Option(None, help="Write a time line of steps (SVG) to this file."),
    as_json: bool = typer.Option(False, "--json", help="JSON lines on standard output."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Send requests at random times: first tokens, gaps, throughput.

    Prompts alone, then loads, one of them with odd sampling options; or your own loads.

    Example: dsv4 bench serve --shape flash --record serve.jsonl --plot serve.svg
    """
    from dsv4.tools.speed.serving.http import bench_http, serving
    from dsv4.tools.speed.serving.serve import STREAMS, Measured, bench_engine, default_loads
    from dsv4.tools.speed.serving.traffic import Load

    if http and shape:
        raise OptionError("--http serves a folder or 'tiny'; leave --shape out")
    if layers and not shape:
        raise OptionError("--layers cuts a --shape; a folder's model runs whole")
    check_writable(files=(record, plot))
    own = [Load.parse(text) for text in load] or ([STREAMS] if http else [])
    options = dict(choices or {})
    report, measured = _Report(record, plot, as_json), []
    with StageStatus(Console(stderr=True)) as stage:
        engine, ready = _start(model, shape, layers, options, stage)
        report.add(ready, stage)
        lengths, loads = ([], own) if own else default_loads(engine)
        watch = plot is not None or not http
        bound_ms = engine.settings.max_gap_ms if engine.settings.cuda_graphs else 0.0
        total = len(lengths) + len(loads) * (2 if http else 1)
        numbers = itertools.count()

        def say(text: str) -> None:
            stage(text, next(numbers), total)

        for row in bench_engine(engine, lengths, loads, say, watch=watch):
            if isinstance(row, Measured):
                measured.append(row)
                report.draw(measured, bound_ms)
            report.add(row.result if isinstance(row, Measured) else row, stage)
        engine.close()
        if http:
            stage("starting the server")
            vocab_size, most = engine.config.vocab_size, max(item.requests for item in loads)
            with serving(model, options, most) as address:
                results = [item.result for item in measured]
                for over_http in bench_http(address, results, vocab_size, say):
                    report.add(over_http, stage)
    for what, path in (("recorded", record), ("drawn", plot)):
        if path is not None:
            Console(stderr=True).print(f"{what} in {path}", highlight=False, soft_wrap=True)


def _start(
    model: str, shape: str, layers: int, options: dict[str, Any], stage: StageStatus
) -> "tuple[Engine, Ready]":
    """Start an engine; this benchmark's own defaults are added to `options`."""
    from dsv4.tools.speed.model import shape_config
    from dsv4.tools.speed.serving.serve import Ready, random_engine

    kept = layers or FITTING_LAYERS.get(shape)
    config = shape_config(shape, kept) if shape else ModelConfig.from_folder(model_folder(model))
    if options.get("max_context") is None:
        options["max_context"] = min(MAX_CONTEXT, config.max_positions)
    if options.get("max_sequences") is None:
        options["max_sequences"] = MAX_SEQUENCES
    if shape:
        stage(f"random weights of {config.num_layers} layers of {shape}, then warm-up")
        with ProgressBar(Console(stderr=True), "warming up", "steps") as work:

            def warm_up(done: int, total: int) -> None:
                stage.pause()
                work(done, total)

            return random_engine(shape, config, EngineConfig.make(**options), warm_up)
    begin = time.perf_counter()
    engine = load_engine(model, options, Console(stderr=True))
    ready_s = round(time.perf_counter() - begin, 2)
    return engine, Ready(Path(model).name, str(engine.settings), ready_s)


class _Report:
    """Prints rows as they arrive and rewrites both files, so that an interrupted run is kept."""

    def __init__(self, record: Path | None, plot: Path | None, as_json: bool) -> None:
        self._record, self._plot, self._as_json = record, plot, as_json
        self._lines: list[str] = []

    def add(self, row: "Row", stage: StageStatus) -> None:
        from dsv4.tools.bench_ops import run_facts

        names = {"IdleLatency": "alone", "LoadResult": "load"}  # as in records
        kind = names.get(type(row).__name__, type(row).__name__.lower())
        line = json.dumps({kind: asdict(row)})
        stage.pause()
        sys.stdout.write((line if self._as_json else text_of(row)) + "\n")
        sys.stdout.flush()
        if self._record is not None:
            self._lines = self._lines or [json.dumps({"run": run_facts()})]
            self._lines.append(line)
            self._record.write_text("\n".join(self._lines) + "\n", encoding="utf-8")

    def draw(self, loads: "list[Measured]", max_gap_ms: float) -> None:
        from dsv4.tools.speed.timeline import picture

        if self._plot is not None:
            self._plot.write_text(picture(loads, max_gap_ms), encoding="utf-8")


def text_of(row: "Row") -> str:
    """A row for the terminal."""
    from dsv4.tools.speed.serving.http import Share
    from dsv4.tools.speed.serving.serve import IdleLatency, Ready, Warnings
    from dsv4.tools.speed.serving.traffic import Load

    if isinstance(row, Ready):
        made = "" if row.weights_s is None else f", weights made in {row.weights_s:g} s"
        return f"{row.model}: ready after {row.ready_s:g} s{made}"
    if isinstance(row, IdleLatency):
        return (
            f"alone, {row.num_prompt} in: first token {row.first_ms:g} ms "
            f"({row.num_cached} cached: {row.cached_first_ms:g} ms), gap {row.gap_ms:g} ms"
        )
    if isinstance(row, Warnings):
        return "\n  ".join([f"{row.count} warnings after ready", *row.some])
    load = Load(**row.load)
    if isinstance(row, Share):
        return (
            f"server: {row.server_ms:g} ms a token at p50 ({row.http_token_ms:g} over HTTP, "
            f"{row.engine_token_ms:g} in the engine alone)"
        )
    most = "" if row.most_tokens_per_s is None else f" of at most {row.most_tokens_per_s:g}"
    lines = [f"{row.via}: {load}", f"{row.tokens_per_s:g} tokens/s{most}"]
    if row.num_steps:
        lines[1] += f"; {row.num_steps} steps, {row.num_prompt_steps} with prompts"
    if row.hit_rate:
        lines[1] += f"; {row.hit_rate:.0%} of the prompts cached"
    named = {"first token": row.first_ms, "gap": row.gap_ms, "per token": row.token_ms}
    for name, times in named.items():
        if times:
            lines.append(f"{name} ms: " + ", ".join(f"{p} {ms:g}" for p, ms in times.items()))
    if row.num_failed:
        lines += [f"{row.num_failed} FAILED", *row.errors]
    return "\n  ".join(lines)
