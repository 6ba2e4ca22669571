"""`dsv4 inspect`: what a checkpoint is."""

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.tools.inspect import Summary, inspect_checkpoint
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def inspect(
    model: str = typer.Argument("tiny", help="A folder with config.json and safetensors."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show a checkpoint's layout, formats and sizes from its headers.

    Exit code 1 if it could not be loaded as it is.

    Example: dsv4 inspect ./DeepSeek-V4-Flash --json
    """
    summary = inspect_checkpoint(model_folder(model))
    if as_json:
        sys.stdout.write(json.dumps(summary.to_json(), indent=2) + "\n")
    else:
        _print(summary, Console())
    if summary.num_errors:
        raise typer.Exit(1)


def _print(summary: Summary, console: Console) -> None:
    console.print(f"[bold]{escape(summary.title)}[/] ({summary.layout}), {summary.names} names")
    console.print(
        f"{summary.num_tensors:,} tensors in {summary.num_files} files, "
        f"{size_text(summary.nbytes)}, {summary.num_parameters / 1e6:,.2f} M parameters"
        + ("" if summary.draft.kind == "none" else " without the draft")
    )
    for line in summary.kinds:
        console.print(f"  {line}")
    table = Table("group", "formats", "tensors", "size", "share", "example")
    for column in table.columns:
        column.overflow = "fold"  # wrap long names, never truncate them
    for group in summary.groups:
        table.add_row(
            group.name,
            ", ".join(group.formats),
            f"{group.num_tensors:,}",
            size_text(group.nbytes),
            f"{100 * group.nbytes / max(summary.nbytes, 1):.1f} %",
            escape(group.example),
        )
    console.print(table)
    draft = summary.draft
    if draft.kind == "none":
        console.print("draft: none")
    else:
        console.print(
            f"draft: {draft.kind}, {draft.num_blocks} block(s), {draft.num_tensors:,} tensors, "
            f"{size_text(draft.nbytes)}, experts stored as {draft.expert_dtype}"
        )
    for reason, count in summary.ignored.items():
        console.print(f"ignored: {count:,} x {escape(reason)}")
    for line in summary.findings[:10]:
        console.print(f"[yellow]finding:[/] {escape(line)}")
    if len(summary.findings) > 10:
        console.print(f"... {len(summary.findings) - 10} more; `dsv4 check` lists them")
