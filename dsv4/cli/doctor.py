"""`dsv4 doctor`: which operation is wrong, on this machine or in this checkpoint?"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.cli.options import engine_options
from dsv4.config import EngineConfig
from dsv4.errors import Dsv4Error, OptionError
from dsv4.util.output_paths import check_writable

if TYPE_CHECKING:
    from dsv4.tools.doctor.device.machine import Machine
    from dsv4.tools.doctor.device.ops import OpResult
    from dsv4.tools.doctor.examine import ModelReport
    from dsv4.tools.doctor.parallel import ParallelReport
    from dsv4.tools.doctor.report import DoctorReport
    from dsv4.tools.doctor.subject import Subject

log = logging.getLogger(__name__)

_COLORS = {"ok": "green", "wrong": "bold red", "skipped": "yellow", "unsupported": "yellow"}
_RESULTS = {"unsupported": "no kernel"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(engine_options(doctor))


def doctor(
    model: str = typer.Argument("tiny", help="A folder, 'tiny', or 'replay'."),
    capsule: Path | None = typer.Argument(None, help="After 'replay': a folder of --save."),
    ops: bool = typer.Option(False, "--ops", help="Only the machine and its kernels, no model."),
    check_all: bool = typer.Option(
        False, "--all", help="With --ops: check all cases, however long it takes."
    ),
    parallel: bool = typer.Option(
        False, "--parallel", help="Only several ranks: exchanges, answers like one rank, times."
    ),
    prompt: str | None = typer.Option(None, "--prompt", "-p", help="Text to run; repeated."),
    tokens: int | None = typer.Option(None, help="Length of the run in tokens."),
    against: str | None = typer.Option(
        None, help="Another checkpoint of the model whose weights count as right."
    ),
    stream: bool | None = typer.Option(
        None, "--stream/--no-stream", help="One layer at a time from disk; default: if needed."
    ),
    save: Path | None = typer.Option(None, help="Write the first wrong call as a capsule."),
    picture: Path | None = typer.Option(None, help="Write the picture as SVG to this file."),
    report: Path | None = typer.Option(None, help="Write everything as JSON to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    *,
    choices: dict[str, Any],
) -> None:
    """Find the operation that is wrong; exit code 1 if there is one.

    Exit code 0: every checked op is correct.

    Examples: dsv4 doctor; dsv4 doctor ./model --save bug; dsv4 doctor replay bug
    """
    console = Console(stderr=as_json)
    check_writable(files=(picture, report), folders=(save,))
    options = {"prompt": prompt, "tokens": tokens, "against": against, "stream": stream}
    _check_options({**options, "save": save, "picture": picture}, ops, check_all, parallel)
    if parallel:
        _examine_ranks(model, EngineConfig.make(**choices), console, report, as_json=as_json)
        return
    if model == "replay":
        _replay(capsule, as_json)
        return
    if capsule is not None:
        raise OptionError(f"found a second argument {str(capsule)!r}; only replay takes one")
    found, subject = _examine(
        console,
        model,
        EngineConfig.make(**choices),
        with_model=not ops,
        limit=ops and not check_all,
        options=options,
    )
    _write(found, subject, save, picture, report, console)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
    _conclude(found, console)
    if not found.ok:
        raise typer.Exit(1)


def _check_options(of_model: dict[str, Any], ops: bool, check_all: bool, parallel: bool) -> None:
    """Options that would be ignored are errors."""
    given = {f"--{name}": value is not None for name, value in of_model.items()}
    if parallel:
        why, given = "--parallel examines only ranks", {"--ops": ops, "--all": check_all, **given}
    elif ops:
        why = "--ops examines no model"
    elif check_all:
        raise OptionError(
            "--all is for the cases of --ops; without it all of a model's are checked"
        )
    else:
        return
    if any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise OptionError(f"{why}; leave out {names}")


def _examine_ranks(
    model: str, choices: EngineConfig, console: Console, report: Path | None, *, as_json: bool
) -> None:
    """Exit code 1 if ranks differ from one."""
    from dsv4.tools.doctor.parallel import examine_ranks

    with console.status("loading on one rank") as status:
        found = examine_ranks(model, choices, status.update)
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if report is not None:
        report.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    _print_ranks(found, console)
    if not found.ok:
        raise typer.Exit(1)


def _print_ranks(found: "ParallelReport", console: Console) -> None:
    dp = ", attention dp" if found.attention == "dp" else ""
    where = f"tp {found.tp}, pp {found.pp}{dp} on {found.device}"
    console.print(f"{where}, {escape(found.model)}", soft_wrap=True)
    table = Table("bytes", "gather us", "GB/s", "to the next stage us", "GB/s")
    for row in found.exchanges:
        cells = []
        for time_us in (row.gather_us, row.send_us):
            rate = f"{row.nbytes / time_us / 1e3:.3g}" if time_us else ""
            cells += [f"{time_us:.1f}" if time_us else "", rate]
        table.add_row(f"{row.nbytes:,}", *cells)
    console.print(table)
    times = Table("ms", "one rank", f"tp {found.tp}, pp {found.pp}")
    for name, (one, these) in found.times.items():
        times.add_row(name, f"{one:.2f}", f"{these:.2f}")
    console.print(times)
    if found.fullest_share:
        console.print(
            f"experts: the fullest rank has {found.fullest_share:.2f} times an even share"
        )
    for line in found.differences:
        console.print(f"[bold red]wrong:[/] {escape(line)}")
    if found.ok:
        console.print(
            f"[green]equal:[/] {found.num_tokens} tokens with their log-probabilities and "
            f"{found.num_logits:,} logits have the bits of one rank"
        )


def _examine(
    console: Console,
    model: str,
    choices: EngineConfig,
    *,
    with_model: bool,
    limit: bool,
    options: dict[str, Any],
) -> tuple["DoctorReport", "Subject | None"]:
    import torch

    from dsv4.ops.core.gpu import usable_device
    from dsv4.tools.doctor.device.all_ops import REPORT_SECONDS, check_ops
    from dsv4.tools.doctor.device.machine import examine_machine
    from dsv4.tools.doctor.device.sampling import check_sampling
    from dsv4.tools.doctor.examine import examine_model
    from dsv4.tools.doctor.report import DoctorReport
    from dsv4.tools.doctor.subject import open_subject

    subject = open_subject(model, choices, **options) if with_model else None
    device = usable_device(choices.device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with console.status("looking at the machine"):
        found = DoctorReport(examine_machine(device))
    _print_machine(found.machine, console)
    what = "comparing ops with their references"
    with console.status(what) as status:

        def count(done: int, total: int) -> None:
            status.update(f"{what}: {done} of {total} cases")

        found.ops = check_ops(device, seconds=REPORT_SECONDS if limit else None, progress=count)
    with console.status("drawing tokens"), _surviving(found, "drawing tokens"):
        found.ops += check_sampling(device)
    _print_ops(found.ops, console)
    if subject is not None:
        what = "comparing the model with its formulas"
        with console.status(f"{what}, op by op") as status, _surviving(found, what):

            def progress(layer: int, count: int) -> None:
                status.update(f"{what}: layer {layer} of {count}")

            found.model = examine_model(subject, progress=progress)
        if found.model is not None:
            _print_model(found.model, console)
    return found, subject


@contextmanager
def _surviving(found: "DoctorReport", what: str) -> Iterator[None]:
    """Record an error in one part of the examination as a finding."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        log.debug("broke off while %s", what, exc_info=True)
        text = str(error) if isinstance(error, Dsv4Error) else repr(error)
        found.failures.append(f"doctor broke off while {what}: {text} (--debug shows where)")


def _write(
    found: "DoctorReport",
    subject: "Subject | None",
    save: Path | None,
    picture: Path | None,
    report: Path | None,
    console: Console,
) -> None:
    from dsv4.tools.doctor.capsule import save_capsule
    from dsv4.tools.doctor.picture import write_picture

    if report is not None:
        found.write(report)
        console.print(f"report in {report}")
    if found.model is None or subject is None:
        return
    if picture is not None:
        write_picture(picture, found.model, subject.config.compress_ratios)
        console.print(f"picture in {picture}")
    if save is not None and found.model.first is not None:
        save_capsule(save, found.model.first, subject.config, found.model.settings)
        console.print(f"capsule in {save}; dsv4 doctor replay {save} runs it anywhere")
    elif save is not None:
        console.print("no op is wrong, so there is no capsule to save")


def _print_machine(machine: "Machine", console: Console) -> None:
    console.print(
        f"[bold]machine[/] {escape(f'{machine.device} {machine.capability}'.rstrip())}, "
        f"{machine.bandwidth_gbs:g} GB/s"
        + (f" of {machine.published_gbs:g} published" if machine.published_gbs else "")
        + f"; dsv4 {machine.dsv4}, torch {machine.torch}, triton {machine.triton}, "
        f"CUDA {machine.cuda}{machine.driver and f' (driver {machine.driver})'}, "
        f"python {machine.python}"
    )
    widths = ", ".join(f"{group} {width}" for group, width in machine.activations.items())
    console.print(f"[bold]activations[/] auto: {widths} ({escape(machine.activations_why)})")
    _print_kernels(machine.kernels, console)
    for note in machine.notes:
        console.print(f"[yellow]note[/] {escape(note)}")


def _print_kernels(rows: list[dict[str, str]], console: Console) -> None:
    """One line per op: what runs for each format, and why if it is a reference."""
    if all(row["runs"] == "reference" for row in rows):
        console.print(f"[bold]kernels[/] none, references: {escape(rows[0]['why'])}")
        return
    console.print("[bold]kernels[/] by op and format")
    for op in dict.fromkeys(row["op"] for row in rows):
        parts: dict[str, list[str]] = {}
        for row in rows:
            if row["op"] == op:
                why = f" ({row['why']})" if row["runs"] == "reference" else ""
                parts.setdefault(row["runs"] + why, []).append(row["format"])
        line = "; ".join(f"{' | '.join(formats)}: {runs}" for runs, formats in parts.items())
        console.print(f"  {op}: {escape(line)}", soft_wrap=True)


def _print_ops(results: list["OpResult"], console: Console) -> None:
    from dsv4.tools.doctor.device.all_ops import coverage, summarize

    table = Table("op", "runs", "cases", "result", "worst", "us", "")
    for row in summarize(results):
        color, result = _COLORS[row["status"]], _RESULTS.get(row["status"], row["status"])
        worst = f"{row['worst']:.2g}" if row["ran"] != "reference" else ""
        time_us = f"{row['time_us']:g}" if row["time_us"] else ""
        table.add_row(
            row["op"],
            row["ran"],
            str(row["cases"]),
            f"[{color}]{result}[/]",
            worst,
            time_us,
            escape(row["detail"]),
        )
    console.print(table)
    console.print("[dim]worst: largest error in units of what the case allows[/]")
    seen = coverage(results)
    for counts, text in (
        (seen.by_reference, "cases that the reference runs, for the reasons above"),
        (seen.left_out, "[yellow]cases left out[/], not checked"),
    ):
        if counts:
            listed = ", ".join(f"{op} {count}" for op, count in counts.items())
            console.print(f"{text}: {listed}", soft_wrap=True)
    for item in results:
        if item.status == "skipped" and item.ran == "kernel":  # it had begun
            console.print(f"[yellow]{escape(f'{item.op}, case {item.case}: {item.detail}')}[/]")


def _print_model(model: "ModelReport", console: Console) -> None:
    from dsv4.tools.doctor.picture import terminal

    console.print(
        f"[bold]model[/] {escape(model.name)} ({model.layout}"
        f"{', streamed' if model.streamed else ''}), {model.num_tokens} tokens; "
        f"{escape(model.settings)}"
    )
    for line in model.plan:
        console.print(f"  {escape(line)}", soft_wrap=True)
    console.print(_layer_table(model))
    console.print(terminal(model))
    for item in model.crossings:
        console.print(
            f"[{_COLORS[item.status]}]{item.status}[/] {item.name}: {escape(item.detail)}"
        )


def _layer_table(model: "ModelReport") -> Table:
    """Per layer: the op closest to its limit, the first wrong one, and how errors accumulate."""
    from dsv4.tools.doctor.check import worst

    table = Table("layer", "furthest op", "error", "allowed", "cosine", "first wrong", "end to end")
    for layer in sorted({cell.layer for cell in model.cells}):
        cells = [cell for cell in model.cells if cell.layer == layer]
        far = worst(cells)
        assert far is not None
        first = next((cell.station for cell in cells if cell.status != "ok"), "")
        summed = model.end_to_end.get(layer)
        table.add_row(
            str(layer),
            far.station,
            f"{far.error.worst:.1e}",
            f"{far.limit.worst:.0e}",
            f"{far.error.cosine:.6f}",
            f"[bold red]{first}[/]",
            f"{summed.worst:.1e}" if summed else "",
        )
    logits = model.end_to_end.get(max((c.layer for c in model.cells), default=0) + 1)
    if logits is not None:
        table.add_row("logits", "", "", "", f"{logits.cosine:.6f}", "", f"{logits.worst:.1e}")
    return table


def _conclude(found: "DoctorReport", console: Console) -> None:
    for line in found.conclusions():
        console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
    if found.ok:
        console.print(f"[{'green' if found.is_complete else 'yellow'}]{found.verdict()}[/]")


def _replay(folder: Path | None, as_json: bool) -> None:
    import torch

    from dsv4.tools.doctor.capsule import replay

    if folder is None:
        raise OptionError("replay needs the folder of a capsule: dsv4 doctor replay DIR")
    found = replay(folder, "cuda" if torch.cuda.is_available() else "cpu")
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "verdict": found.verdict}, indent=1) + "\n")
    else:
        console = Console()
        console.print(f"{found.title} in layer {found.layer}, position {found.position}")
        console.print(f"cause given then: {escape(found.cause)}", soft_wrap=True)
        console.print(
            f"then against the formulas: {found.found_error:.2g} (allowed {found.limit:.2g})"
        )
        console.print(f"then against the reference here: {found.reference_error:.2g}")
        if found.kernel_error is not None:
            console.print(f"kernel here against the reference: {found.kernel_error:.2g}")
        console.print(f"[bold]{found.verdict}[/]")
    if not found.is_fixed:
        raise typer.Exit(1)
