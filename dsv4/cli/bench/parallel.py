"""`dsv4 bench parallel`: what layouts over several GPUs take, predicted or measured."""

import json
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsv4.cli.bench.steps import DEVICE, FITTING_LAYERS, LAYERS, RECORD, numbers
from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.util.output_paths import check_writable
from dsv4.util.sizes import size_text

if TYPE_CHECKING:
    from dsv4.runner.ranks.cluster import Interconnect


def parallel(
    predict: str = typer.Option("", help="Run nothing: flash or pro."),
    slices: str = typer.Option("", help="Time one rank's slices here: flash, pro; trial: any CPU."),
    gpu: str = typer.Option("h200", help="Whose rates to use."),
    tp: str = typer.Option("1,2,4,8", help="Ranks that share a layer."),
    pp: str = typer.Option("1", help="Stages."),
    experts: str = typer.Option("whole", help="Of a rank: whole ones, or split: a part of each."),
    attention: str = typer.Option("tp", help="Of a rank: some heads (tp), or sequences (dp)."),
    nodes: int = typer.Option(1, min=1, help="Machines that the ranks are spread over."),
    link: str | None = typer.Option(
        None, help="nvlink, pcie, pcie4, 200g; default: that of --gpu."
    ),
    exchange_us: float | None = typer.Option(None, min=0, help="Of an exchange, without bytes."),
    link_gbs: float | None = typer.Option(None, min=0.001, help="GB/s between two GPUs."),
    batch: str = typer.Option("1,32", help="Sequences of a decode step."),
    prompt: int = typer.Option(8192, min=1, help="Tokens of a prompt."),
    weights: str = typer.Option("official", help="Formats of the weights, as for plan."),
    layers: int = LAYERS,
    device: str = DEVICE,
    record: Path | None = RECORD,
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Predict the times of layouts over several GPUs, or time slices.

    Example: dsv4 bench parallel --predict flash --gpu h200 --tp 1,2,4,8 --batch 1,32
    """
    from dsv4.runner.ranks.cluster import Cluster
    from dsv4.tools.plan import planned_model
    from dsv4.tools.speed.layouts import assumptions, plan_layouts

    if bool(predict) == bool(slices):
        raise OptionError(
            "give --predict flash (or pro), or --slices; what this machine's ranks take together "
            "is measured by dsv4 doctor --parallel"
        )
    texts: dict[str, Any] = {"experts": experts, "attention": attention}  # EngineConfig checks them
    batches, choices = numbers("batch", batch), EngineConfig(**texts)
    if slices:
        tps = numbers("tp", tp)
        _slices(slices, layers, tps, batches, prompt, device, gpu, record, choices)
        return
    pairs = [(a, b) for b in numbers("pp", pp) for a in numbers("tp", tp)]
    if attention == "dp":  # one rank alone has all sequences anyway
        pairs = [pair for pair in pairs if pair[0] > 1] or pairs
    most = max(a * b for a, b in pairs)
    cluster = Cluster.of(gpu, -(-most // nodes) * nodes, nodes, None, link)
    cluster = replace(cluster, link=_link(cluster.link, exchange_us, link_gbs))
    subject = planned_model(predict, weights)
    result = plan_layouts(subject, cluster, choices, batches=batches, prompt=prompt, only=pairs)
    rows = [row_of(found, predict, gpu, prompt) for found in result.forecasts]
    if as_json:
        found = {"model": predict, "weights": weights, "assumptions": assumptions(cluster)}
        sys.stdout.write(json.dumps({**found, "layouts": rows}, indent=2) + "\n")
        return
    console = Console()
    for line in ("predicted, not run:", *assumptions(cluster)):
        console.print(line, highlight=False, soft_wrap=True)
    for line in chain.from_iterable(map(lines_of, rows)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _link(link: "Interconnect", exchange_us: float | None, gbs: float | None) -> "Interconnect":
    """A link with what is given instead of what is assumed."""
    if exchange_us is not None:
        link = replace(link, exchange_us=exchange_us, source="as given")
        if link.store_us is not None:
            link = replace(link, store_us=exchange_us)
    if gbs is not None:
        link = replace(link, gbs=gbs, source="as given")
    return link


def _slices(
    shape: str,
    layers: int,
    tps: list[int],
    batches: list[int],
    prompt: int,
    device: str,
    gpu: str,
    record: Path | None,
    choices: EngineConfig,
) -> None:
    """Compute as measured, exchanges as predicted: the only figure that mixes both."""
    from dsv4.parallel.layout import RankLayout
    from dsv4.runner.ranks.cluster import Cluster
    from dsv4.tools.bench_ops import run_facts
    from dsv4.tools.speed.layouts import exchange_ms
    from dsv4.tools.speed.slices import measure_slices

    experts = choices.experts
    if choices.attention == "dp":
        raise OptionError("--slices times a rank with some heads; leave out --attention dp")
    check_writable(files=(record,))
    console, lines = Console(), [json.dumps({"run": run_facts()})]
    cluster = Cluster.of(gpu, max(tps))
    count = layers or FITTING_LAYERS.get(shape)
    context = 200 if shape == "trial" else 4096
    console.print("compute measured on one device, + exchange assumed (not run)", soft_wrap=True)
    for row in measure_slices(shape, count, tps, batches, prompt, device, context, experts):
        rows = row.batch if row.what == "decode" else row.context
        layout = RankLayout(row.tp, split_experts=experts == "split")
        extra = 0.0 if shape == "trial" else exchange_ms(shape, cluster, layout, rows)
        what = f"batch {row.batch}" if row.what == "decode" else f"prompt {row.context}"
        console.print(
            f"tp {row.tp}  {what:<12} {row.full_ms:9.3f} ms + {extra:.3f} = "
            f"{row.full_ms + extra:.3f} ms ({row.layers} layers measured)",
            highlight=False,
        )
        result = {**asdict(row), "what": f"slices {row.what}", "exchange_ms": round(extra, 4)}
        lines.append(json.dumps({"result": result}))
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("\n".join(lines) + "\n", encoding="utf-8")
        console.print(f"recorded in {record}")


def row_of(found: Any, model: str, gpu: str, prompt: int) -> dict[str, Any]:
    from dsv4.tools.speed.layouts import measured

    steps = {
        batch: {
            "read_ms": round(step.read, 3),
            "layers_ms": round(step.layers, 3),
            "exchange_ms": round(step.exchange, 3),
            "ms": round(step.total, 3),
            "tokens_per_s": round(batch * 1e3 / step.total, 1),
            "user_tokens_per_s": round(1e3 / step.total, 1),
            "fullest_rank_experts": round(found.fullest[batch], 2),
            "layer_mb": round(found.layer_mb[batch], 3),
            "bound": max(("read", "layers", "exchange"), key=lambda part: getattr(step, part)),
        }
        for batch, step in found.steps.items()
    }
    return {
        "tp": found.tp,
        "pp": found.pp,
        "weight_bytes": max(stage.weight_bytes for stage in found.stages),
        "fits": found.fits,
        "kv_tokens": found.kv_tokens,
        "steps": steps,
        "prompt": {
            "tokens": prompt,
            "compute_ms": round(found.prompt_compute_ms, 1),
            "exchange_ms": round(found.prompt_exchange_ms, 1),
            "ms": round(found.prompt_ms, 1),
            "layer_mb": round(found.layer_mb[prompt], 1),
            "bound": found.prompt_bound,
        },
        "measured": measured(model, gpu, found.tp, found.pp, found.attention),
    }


def lines_of(row: dict[str, Any]) -> list[str]:
    """At most 80 columns wide."""
    room = f"{row['kv_tokens'] / 1e6:.1f} M tokens of KV" if row["fits"] else "no room"
    lines = [f"\ntp {row['tp']}, pp {row['pp']}: {size_text(row['weight_bytes'])} a GPU, {room}"]
    for batch, step in row["steps"].items():
        lines.append(
            f"  batch {batch:<4} {step['ms']:8.2f} ms = {step['read_ms']:.2f} read + "
            f"{step['layers_ms']:.2f} layers + {step['exchange_ms']:.2f} exchange"
        )
        lines.append(
            f"  {'':10} {step['tokens_per_s']:8.0f} tokens/s, {step['user_tokens_per_s']:.0f} a "
            f"user; {step['layer_mb']:.2f} MB a layer, {step['fullest_rank_experts']:g} experts"
        )
    p = row["prompt"]
    lines.append(
        f"  prompt {p['tokens']:<5} {p['ms']:7.0f} ms = {p['compute_ms']:.0f} compute + "
        f"{p['exchange_ms']:.0f} exchange; {p['layer_mb']:.0f} MB a layer; {p['bound']}"
    )
    return [*lines, f"  measured: {row['measured']}" if row["measured"] else "  not measured"]
