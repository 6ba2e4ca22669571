"""`dsv4 serve`: the HTTP server and the web page."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dsv4.cli.options import MODEL, engine_options, field_options
from dsv4.cli.progress import ProgressBar
from dsv4.config import EngineConfig
from dsv4.deploy.options import RayOptions
from dsv4.errors import OptionError
from dsv4.server.options import ServerOptions, clean_keys, clean_origins, read_keys
from dsv4.util.logs import log_requests
from dsv4.util.output_paths import check_writable

# The same options under other servers' names.
ALIASES = {
    "max_context": ("--max-model-len", "--context-length", "--ctx-size"),
    "max_sequences": ("--max-num-seqs", "--max-running-requests", "--parallel"),
}


def register(app: typer.Typer) -> None:
    with_ray = field_options(serve, RayOptions, "ray_choices", "Ray (with --ray)")
    app.command("serve")(engine_options(with_ray, ALIASES))


def serve(
    model: str = MODEL,
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0: a free one."),
    api_key: list[str] = typer.Option(
        [], envvar="DSV4_API_KEY", help="A key that clients must send; may be given several times."
    ),
    api_key_file: Path | None = typer.Option(None, help="A file with one key on each line."),
    priority_key_file: Path | None = typer.Option(
        None, help="A file with keys whose requests may carry a priority."
    ),
    share_prefixes: bool = typer.Option(
        False, "--share-prefixes", help="Share cached prompt beginnings between keys."
    ),
    served_model_name: list[str] = typer.Option(
        [], "--served-model-name", "--alias", help="The model's name; may be given several times."
    ),
    any_model: bool = typer.Option(False, "--any-model", help="Answer under any model name."),
    cors_origin: list[str] = typer.Option([], help="A web page's origin that may call; or '*'."),
    max_waiting: int = typer.Option(256, min=0, help="Requests that may wait; others get 429."),
    drain_seconds: float = typer.Option(30.0, min=0, help="Time for running answers at the end."),
    trace: Path | None = typer.Option(None, help="Append prompts and raw outputs to this file."),
    ray: bool = typer.Option(
        False, "--ray", help="Several engines behind one address, on Ray Serve."
    ),
    choices: dict[str, Any] | None = None,
    ray_choices: dict[str, Any] | None = None,
) -> None:
    """Serve a model to OpenAI and Anthropic clients and the browser.

    Example: dsv4 serve --port 8000 --api-key-file keys.txt
    """
    ray_options = RayOptions(**(ray_choices or {}))
    if not ray and ray_options != RayOptions():
        raise OptionError("options about replicas need --ray")
    run = _runner(ray_options if ray else None)
    _follow_torchrun(choices or {})
    clean_keys(api_key, "--api-key")
    _hide_keys(api_key)
    priority_keys = read_keys(priority_key_file, "--priority-key-file")
    options = ServerOptions(
        host=host,
        port=port,
        api_keys=(*api_key, *read_keys(api_key_file, "--api-key-file"), *priority_keys),
        priority_keys=tuple(priority_keys),
        share_prefixes=share_prefixes,
        names=tuple(served_model_name),
        any_model=any_model,
        cors_origins=clean_origins(cors_origin),
        max_waiting=max_waiting,
        drain_seconds=drain_seconds,
        trace=trace,
    )
    check_writable(files=(trace,))
    log_requests()
    with _Screen((served_model_name or [model])[0]) as screen:
        run(model, choices or {}, options, notify=screen.show)


def _runner(ray_options: RayOptions | None) -> Callable[..., None]:
    """The server's `serve` or, with options for replicas, the Ray application's."""
    try:
        if ray_options is not None:
            from dsv4.deploy.ray import serve as on_ray

            return functools.partial(on_ray, ray_options=ray_options)
        from dsv4.server.run import serve as run
    except ModuleNotFoundError as error:
        what, extra = ("--ray", "ray") if error.name == "ray" else ("the server", "server")
        raise OptionError(
            f"{what} needs the package {error.name!r}, which is not installed; "
            f"install it with: pip install 'dsv4[{extra}]'"
        ) from error
    return run


def _follow_torchrun(choices: dict[str, Any]) -> None:
    """Only the process of rank 0 serves."""
    if os.environ.get("RANK", "0") != "0":
        from dsv4.runner.ranks.start import follow_torchrun

        follow_torchrun(choices.get("join_timeout", EngineConfig.join_timeout))


def _hide_keys(keys: list[str]) -> None:
    """Re-exec with the keys in the environment: other users can read a command line."""
    given = list(sys.orig_argv)
    for place in reversed(range(len(given))):
        if given[place] == "--api-key":
            del given[place : place + 2]
        elif given[place].startswith("--api-key="):
            del given[place]
    if given != sys.orig_argv:
        os.execve(sys.executable, given, {**os.environ, "DSV4_API_KEY": " ".join(keys)})


def ready_lines(address: str, model: str, plan: str) -> list[str]:
    """The address, the model and its layout, and what to try first."""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return [
        f"ready: {address}",
        f"  model  {model}; {plan.partition('; activations')[0]}",
        "  try    open that address in a browser, or",
        f"         curl -s {address}/v1/chat/completions -H 'content-type: application/json' "
        f"-d '{body}'",
        "  stop   Ctrl-C",
    ]


class _Screen:
    """Prints plan, progress and the ready lines on stderr."""

    def __init__(self, model: str) -> None:
        self._model, self._plan = model, ""
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._bars = {
            "load": ProgressBar(self._console, "loading weights"),
            "warm-up": ProgressBar(self._console, "warming up", "steps"),
        }
        self._is_open = True

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._stop)

    def show(self, message: dict[str, Any]) -> None:
        self._write(lambda: self._show(message))

    def _write(self, work: Callable[[], None]) -> None:
        """Print if possible; serving continues on a full disk or a closed terminal."""
        try:
            if self._is_open:
                work()
        except OSError:
            self._is_open = False

    def _stop(self) -> None:
        for bar in self._bars.values():
            bar.stop()

    def _show(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "plan":
            self._plan = message["text"]
            self._console.print(f"plan: {self._plan}", soft_wrap=True)
            self._bars["load"].__enter__()
        elif kind == "progress":
            done, total = message["done"], message["total"]
            self._bars[message["stage"]](done, total)
            if message["stage"] == "load" and done == total:
                self._console.print("weights loaded; warming up", soft_wrap=True)
        elif kind == "ready":
            self._stop()
            for line in ready_lines(message["address"], self._model, self._plan):
                self._console.print(line, soft_wrap=True)
        elif kind == "failed":
            self._console.print(f"the engine could not be restarted: {message['error']}")
