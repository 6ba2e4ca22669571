"""`dsv4 join`: this machine's ranks of an engine that runs on another one."""

import typer
from rich.console import Console

from dsv4 import __version__


def register(app: typer.Typer) -> None:
    app.command("join")(join)


def join(
    head: str = typer.Argument(..., help="HOST:PORT that the engine was given as --head."),
    node: int = typer.Option(..., min=1, help="Number of this machine, from 1 on."),
    model: str | None = typer.Option(None, help="Where the files are here; default: as there."),
    join_timeout: float = typer.Option(600.0, min=0.1, help="Seconds to reach the head."),
) -> None:
    """Run this machine's share of a model; ends with the engine.

    The same DSV4_CLUSTER_KEY must be set here and there. After a restart of the engine this
    machine takes part again.

    Example: dsv4 join 10.0.0.1:29500 --node 1
    """
    from dsv4.parallel.handshake import address_of
    from dsv4.parallel.nodes import Joining
    from dsv4.parallel.nodes import join as run
    from dsv4.runner.ranks import FOLLOWER

    console = Console(stderr=True, highlight=False, markup=False)
    by = Joining(address_of(head), node, FOLLOWER, __version__, model, join_timeout)
    run(by, lambda text: console.print(text, soft_wrap=True))
