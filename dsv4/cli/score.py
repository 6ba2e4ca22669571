"""`dsv4 score`: teacher-forced logits or log-probabilities of given tokens."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.options import engine_options, load_engine
from dsv4.cli.progress import ProgressBar
from dsv4.errors import OptionError, RequestError
from dsv4.util.output_paths import check_writable

if TYPE_CHECKING:
    from torch import Tensor


def register(app: typer.Typer) -> None:
    app.command("score")(engine_options(score))


def score(
    model: str = typer.Argument(..., help="A folder with config.json and safetensors, or 'tiny'."),
    ids: Path = typer.Option(..., help="A JSON file: a list of token ids."),
    output: Path = typer.Option(..., "--output", "-o", help="The safetensors file to write."),
    logprobs: bool = typer.Option(
        False, help="Write logprobs (one per token after the first) instead."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Write the logits of a token sequence; print its perplexity.

    Logits are fp32, tokens x vocabulary.

    Example: dsv4 score tiny --ids ids.json -o logits.safetensors
    """
    token_ids = _read_ids(ids)
    check_writable(files=(output,))
    console = Console(stderr=True)
    engine = load_engine(model, choices or {}, console)
    import torch

    parts = []
    with ProgressBar(console, "scoring", "tokens") as progress:
        done = 0
        for part in engine.score(token_ids):
            parts.append(part)
            done += part.shape[0]
            progress(done, len(token_ids))
    logits = torch.cat(parts).cpu()
    targets = torch.tensor(token_ids[1:]).unsqueeze(1)
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, targets).squeeze(1)
    name, values = ("logprobs", chosen) if logprobs else ("logits", logits)
    _write(output, name, values)
    perplexity = math.exp(-float(chosen.mean())) if len(token_ids) > 1 else None
    if as_json:
        Console().print_json(data={"tokens": len(token_ids), "perplexity": perplexity})
    elif perplexity is None:
        Console().print("1 token: a perplexity needs at least 2")
    else:
        Console().print(f"{len(token_ids)} tokens, perplexity {perplexity:.4f}", highlight=False)


def _write(path: Path, name: str, values: "Tensor") -> None:
    """Write atomically: a full disk leaves no partial file."""
    from dsv4.checkpoint.files.header import OutTensor
    from dsv4.checkpoint.files.writer import ShardWriter

    with ShardWriter(path.resolve(), [OutTensor(name, "F32", tuple(values.shape))]) as writer:
        writer.write(name, values)
        writer.finish()


def _read_ids(path: Path) -> list[int]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the token ids: {error}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, overlong numbers
        raise RequestError(f"{path} is not valid JSON ({error}); expected [1, 2, 3]") from error
    if not isinstance(data, list):
        raise RequestError(f"{path} holds a {type(data).__name__}, expected a list of token ids")
    return data
