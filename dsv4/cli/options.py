"""What several commands share: engine options from EngineConfig, a loading bar."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dsv4.config import EngineConfig

if TYPE_CHECKING:
    from dsv4.engine import Engine

MODEL = typer.Argument("tiny", help="A folder with config.json and safetensors, or 'tiny'.")


def engine_options(
    command: Callable[..., None], aliases: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[..., None]:
    """Give a command every field of EngineConfig as an option; it gets them as `choices`.

    `aliases`: other spellings of a field's option.
    """
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != "choices"]
    added = []
    for item in fields(EngineConfig):
        if item.name in signature.parameters:
            continue
        flag = "--" + item.name.replace("_", "-")
        own_name = f"{flag}/--no-{flag[2:]}" if item.type is bool else flag
        names = (own_name, *(aliases or {}).get(item.name, ()))
        option = typer.Option(
            item.default, *names, help=item.metadata["help"], rich_help_panel="Engine"
        )
        added.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=item.type
            )
        )
    names_added = [parameter.name for parameter in added]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        choices = {name: values.pop(name) for name in names_added}
        command(**values, choices=choices)

    wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return wrapper


@contextmanager
def loading(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes, rate and time left; it goes away when loading is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def load_engine(model: str, choices: dict[str, Any], console: Console) -> "Engine":
    from dsv4.engine import Engine

    with loading(console) as progress:
        return Engine.load(model, progress=progress, **choices)
