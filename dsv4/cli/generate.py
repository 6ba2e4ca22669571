"""`dsv4 generate`: one prompt in, text out."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.options import MODEL, engine_options, load_engine
from dsv4.errors import Dsv4Error, OptionError, RankError, RequestError
from dsv4.request import SamplingParams

if TYPE_CHECKING:
    from dsv4.engine import Engine


def register(app: typer.Typer) -> None:
    app.command("generate")(engine_options(generate))


def generate(
    model: str = MODEL,
    prompt: str | None = typer.Option(
        None, "--prompt", "-p", help="The prompt; '-' reads standard input, as does a pipe alone."
    ),
    prompt_file: Path | None = typer.Option(
        None, help="A UTF-8 file with the prompt; '-' reads standard input."
    ),
    chat: bool = typer.Option(False, "--chat", help="As a user's message (the default)."),
    thinking: bool = typer.Option(False, "--thinking", help="The same, with reasoning first."),
    raw: bool = typer.Option(False, "--raw", help="As it is; markers in it are control."),
    max_tokens: int = typer.Option(256, help="Most tokens of the answer."),
    temperature: float = typer.Option(1.0, help="0 takes the likeliest token each time."),
    top_p: float = typer.Option(1.0),
    top_k: int = typer.Option(0, help="0: off."),
    min_p: float = typer.Option(0.0),
    seed: int | None = typer.Option(None, help="The same seed gives the same answer."),
    stop: list[str] = typer.Option([], help="End at this text; may be given several times."),
    stats: bool = typer.Option(False, "--stats", help="Print tokens/s and time to first token."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Answer one prompt; the text is streamed to standard output.

    Example: dsv4 generate -p "What is the capital of France?" --max-tokens 64 --temperature 0
    """
    if chat + thinking + raw > 1:
        raise OptionError("give one of --chat, --thinking and --raw")
    text = _prompt_text(prompt, prompt_file)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop),
    )
    errors = Console(stderr=True)
    engine = load_engine(model, choices or {}, errors)
    mode = "raw" if raw else "thinking" if thinking else "chat"
    ids = engine.encode(text, mode)
    _run(engine, ids, params, errors, stats)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise OptionError("found -p and --prompt-file, expected one of them")
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise OptionError(
            "found no prompt; give it with -p TEXT, with --prompt-file FILE or through a pipe"
        )
    try:
        if prompt_file is not None and prompt_file != Path("-"):
            prompt = prompt_file.read_text(encoding="utf-8")
        elif prompt is None or prompt == "-":
            prompt = sys.stdin.buffer.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompt: {error}") from error
    if not prompt.strip():  # a variable that is not set, a pipe that gave nothing
        raise RequestError("the prompt is empty; give it with -p TEXT, a file or a pipe")
    return prompt


def _run(
    engine: "Engine", ids: list[int], params: SamplingParams, errors: Console, stats: bool
) -> None:
    begin, first, count = time.perf_counter(), 0.0, 0
    reason = None
    with errors.status(f"reading {len(ids)} prompt tokens") as status:
        try:
            for output in engine.stream(ids, params):
                if count == 0:
                    first = time.perf_counter() - begin
                    status.stop()
                count += len(output.token_ids)
                sys.stdout.write(output.text)
                sys.stdout.flush()
                reason = output.finish_reason
                if output.error:
                    kind = Dsv4Error if engine.failure is None else RankError
                    raise kind(f"the answer broke off: {output.error}")
        except KeyboardInterrupt:
            reason = "abort"
    sys.stdout.write("\n")
    if stats:
        decoding = time.perf_counter() - begin - first
        rate = (count - 1) / decoding if count > 1 else 0.0
        found = engine.stats()
        drafted = f", {found.num_accepted} of {found.num_drafted} drafts accepted"
        errors.print(
            f"{len(ids)} prompt tokens, {count} new ({reason}); first after {first:.2f} s, "
            f"then {rate:.1f} tokens/s{drafted if found.num_verified else ''}",
            highlight=False,
        )
    if reason == "abort":
        raise SystemExit(130)
