"""`dsv4 serve`: the HTTP server and the web page."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dsv4.cli.options import MODEL, engine_options
from dsv4.cli.progress import ProgressBar
from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.util.logs import escape_arguments
from dsv4.util.writable import check_writable

log = logging.getLogger(__name__)

# The same options under other servers' names.
ALIASES = {
    "max_context": ("--max-model-len", "--context-length", "--ctx-size"),
    "max_sequences": ("--max-num-seqs", "--max-running-requests", "--parallel"),
}
_MAX_KEY_FILE_BYTES = 1 << 20


def register(app: typer.Typer) -> None:
    app.command("serve")(engine_options(serve, ALIASES))


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
    choices: dict[str, Any] | None = None,
) -> None:
    """Serve a model to OpenAI and Anthropic clients and the browser.

    Example: dsv4 serve --port 8000 --api-key-file keys.txt
    """
    try:
        from dsv4.server.options import ServerOptions
        from dsv4.server.run import serve as run
    except ModuleNotFoundError as error:
        raise OptionError(
            f"the server needs the package {error.name!r}, which is not installed; "
            "install it with: pip install 'dsv4[server]'"
        ) from error

    _follow_torchrun(choices or {})
    _clean_keys(api_key, "--api-key")
    _hide_keys(api_key)
    priority_keys = _read_keys(priority_key_file, "--priority-key-file")
    options = ServerOptions(
        host=host,
        port=port,
        api_keys=(*api_key, *_read_keys(api_key_file, "--api-key-file"), *priority_keys),
        priority_keys=tuple(priority_keys),
        share_prefixes=share_prefixes,
        names=tuple(served_model_name),
        any_model=any_model,
        cors_origins=tuple(cors_origin),
        max_waiting=max_waiting,
        drain_seconds=drain_seconds,
        trace=trace,
    )
    check_writable(files=(trace,))
    _log_requests()
    with _Screen((served_model_name or [model])[0]) as screen:
        run(model, choices or {}, options, screen.show)


def _follow_torchrun(choices: dict[str, Any]) -> None:
    """Only the process of rank 0 serves."""
    if os.environ.get("RANK", "0") != "0":
        from dsv4.runner.ranks.start import follow_torchrun

        follow_torchrun(choices.get("join_timeout", EngineConfig.join_timeout))


def _log_requests() -> None:
    """One line per request on stderr, independent of the log level."""
    logger = logging.getLogger("dsv4.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(escape_arguments)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _clean_keys(keys: list[str], name: str) -> list[str]:
    for key in keys:
        if not key or " " in key or not key.isascii() or not key.isprintable():
            raise OptionError(
                f"{name}: found a key that is empty or has spaces or odd characters, expected "
                "printable ASCII"
            )
    return keys


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


def _read_keys(path: Path | None, option: str) -> list[str]:
    if path is None:
        return []
    try:
        if path.stat().st_mode & 0o077:
            log.warning("%s: %s can be read by others; chmod 600 keeps it yours", option, path)
        text = path.read_bytes()[:_MAX_KEY_FILE_BYTES].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{option}: cannot be read: {error}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise OptionError(f"{option}: {path} has no key in it, expected one on each line")
    return _clean_keys(keys, option)


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
