"""The `dsv4` command: parses arguments and prints results; `tools` does the work."""

import io
import logging
import sys

import typer
from rich.console import Console
from rich.logging import RichHandler

from dsv4 import __version__
from dsv4.cli.bench import register as add_bench
from dsv4.cli.chat import register as add_chat
from dsv4.cli.check import register as add_check
from dsv4.cli.convert import register as add_convert
from dsv4.cli.doctor import register as add_doctor
from dsv4.cli.generate import register as add_generate
from dsv4.cli.inspect import register as add_inspect
from dsv4.cli.join import register as add_join
from dsv4.cli.plan import register as add_plan
from dsv4.cli.score import register as add_score
from dsv4.cli.serve import register as add_serve
from dsv4.errors import Dsv4Error
from dsv4.util.logs import escape_arguments

app = typer.Typer(
    name="dsv4",
    help="Run, check and convert DeepSeek-V4 models.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: fits 80 columns, and shows flags without a type
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for add in (
    add_generate,
    add_chat,
    add_serve,
    add_join,
    add_score,
    add_inspect,
    add_check,
    add_plan,
    add_convert,
    add_doctor,
    add_bench,
):
    add(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"dsv4 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and debug messages."),
) -> None:
    level = logging.DEBUG if debug else logging.WARNING
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=debug)
    handler.addFilter(escape_arguments)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler], force=True)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no boxes, or no Chinese
    try:
        app(prog_name="dsv4")
    except Dsv4Error as error:
        if "--debug" in sys.argv:
            raise
        _print_error(str(error))
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone
        raise SystemExit(1) from None
    except OSError as error:  # an unreadable folder, a full disk
        if "--debug" in sys.argv:
            raise
        _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        raise SystemExit(1) from None


def _print_error(text: str) -> None:
    line = f"[bold red]error:[/] {_plain(text)}"
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Print a message without interpreting brackets as markup."""
    return text.replace("[", "\\[")
