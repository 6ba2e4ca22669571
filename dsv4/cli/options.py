"""Shared by several commands: the model argument, engine options from EngineConfig, loading."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.progress import ProgressBar
from dsv4.config import EngineConfig
from dsv4.util.models import BUILTIN_MODELS

if TYPE_CHECKING:
    from dsv4.engine import Engine


def complete_model(incomplete: str) -> list[str]:
    """Shell completion: embedded models and folders that start with this text."""
    names = [path.name for path in BUILTIN_MODELS.iterdir() if path.is_dir()]
    head, _, tail = incomplete.rpartition("/")
    root = Path(f"{head}/" if head or incomplete.startswith("/") else ".")
    if root.is_dir():
        prefix = incomplete[: len(incomplete) - len(tail)]
        names += [f"{prefix}{item.name}/" for item in sorted(root.iterdir()) if item.is_dir()]
    return [name for name in names if name.startswith(incomplete)]


MODEL = typer.Argument(
    "tiny",
    help="A folder with config.json and safetensors, or 'tiny'.",
    autocompletion=complete_model,
)


def engine_options(
    command: Callable[..., None], aliases: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[..., None]:
    """Add every field of EngineConfig to a command as an option, passed to it as `choices`.

    `aliases`: alternative names of a field's option.
    """
    return field_options(command, EngineConfig, "choices", "Engine", aliases)


def field_options(
    command: Callable[..., None],
    config: type[Any],
    into: str,
    panel: str,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[..., None]:
    """Add every field of a dataclass as an option; the command gets a dict as its argument `into`.

    `panel`: the heading in the help.
    """
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != into]
    added = []
    for item in fields(config):
        if item.name in signature.parameters:
            continue
        flag = "--" + item.name.replace("_", "-")
        own_name = f"{flag}/--no-{flag[2:]}" if item.type is bool else flag
        names = (own_name, *(aliases or {}).get(item.name, ()))
        option = typer.Option(
            item.default, *names, help=item.metadata["help"], rich_help_panel=panel
        )
        is_text = isinstance(item.default, str)  # the config checks choices; numbers: see below
        kind = str if is_text else item.type
        added.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
            )
        )
    names_added = [parameter.name for parameter in added]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        choices = {name: values.pop(name) for name in names_added}
        if str(choices.get("tp")).isdecimal():
            choices["tp"] = int(choices["tp"])
        command(**values, **{into: choices})

    wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return wrapper


def load_engine(model: str, choices: dict[str, Any], console: Console) -> "Engine":
    from dsv4.engine import Engine

    with (
        ProgressBar(console, "loading weights") as load,
        ProgressBar(console, "warming up", "steps") as warm_up,
    ):
        return Engine.load(model, progress=load, warm_up_progress=warm_up, **choices)
