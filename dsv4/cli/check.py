"""`dsv4 check`: is this checkpoint complete and plausible?"""

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.cli.progress import ProgressBar
from dsv4.tools.check import CheckReport, check_checkpoint
from dsv4.util.models import model_folder

_COLORS = {"pass": "green", "fail": "red", "not decided": "yellow"}
_LISTED = 50


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    model: str = typer.Argument("tiny", help="A folder with config.json and safetensors."),
    values: bool = typer.Option(False, "--values", help="Read every tensor, not only headers."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Verify a checkpoint; exit code 1 if anything is found.

    Example: dsv4 check ./DeepSeek-V4-Flash --values
    """
    folder = model_folder(model)
    if values:
        with ProgressBar(Console(stderr=True), "reading values") as progress:
            report = check_checkpoint(folder, values=True, progress=progress)
    else:
        report = check_checkpoint(folder)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        _print(report, Console())
    if not report.ok:
        raise typer.Exit(1)


def _print(report: CheckReport, console: Console) -> None:
    table = Table("check", "result", "")
    for item in report.checks:
        color = _COLORS[item.status]
        table.add_row(item.title, f"[{color}]{item.status}[/]", escape(item.detail))
    console.print(f"[bold]{escape(report.folder)}[/] ({report.layout})")
    console.print(table)
    for finding in report.findings[:_LISTED]:
        console.print(f"[red]{finding.level}[/] {finding.check}: {escape(finding.line())}")
    if len(report.findings) > _LISTED:
        console.print(f"... {len(report.findings) - _LISTED} more; --json lists them all")
    if report.ok:
        console.print("[green]nothing found[/]")
