"""Layouts of a model over several GPUs: what a rank holds, what a step takes, and which to run.

No torch: applies the engine's own functions (`forecast.py`, `choose_layout.py` of `runner/ranks`)
to any cluster.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsv4.cache.geometry import POOLS, Geometry
from dsv4.checkpoint.names import parameters
from dsv4.checkpoint.rank_slices import held_parts
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks.choose_layout import recommend_for, stage_memory
from dsv4.runner.ranks.cluster import Cluster, Interconnect
from dsv4.runner.ranks.exchange_times import HANDLED_SHARE, RANK_US, layer_exchange_ms
from dsv4.runner.ranks.forecast import (
    COMPUTE_SHARE,
    LAYER_US,
    READ_SHARE,
    Forecast,
    WeightSizes,
    forecast,
    layouts,
    rank_stages,
)
from dsv4.runner.settings import Settings, resolve, score_bytes, step_bytes
from dsv4.tools.plan import MOST_SEQUENCES, PlannedModel, most_sequences

CONTEXTS = (131072, 1048576)  # for which plan counts sequences
MEASURED = Path(__file__).parent / "measured_layouts.json"  # by scripts/make_docs.py


@dataclass(frozen=True)
class StageLedger:
    """Bytes of one rank of a stage."""

    layers: tuple[int, int]  # first, and one past the last
    weight_bytes: dict[str, int]  # by group
    shared_bytes: int  # the part divided among the stage's ranks; the rest is whole on each
    exchange_bytes: int
    step_bytes: int
    free_bytes: int
    token_bytes: float  # state, per token of context
    sequence_bytes: int  # state of a sequence at any length


@dataclass(frozen=True)
class LayoutPlan:
    model: str
    weights: str
    cluster: Cluster
    forecasts: list[Forecast]
    recommended: tuple[int, int] | None
    reason: str
    shown: tuple[int, int]  # the layout that `stages`, `settings` and `commands` describe
    stages: list[StageLedger]
    settings: Settings | None  # None: the engine would not start
    state_bytes: int  # of a rank of the fullest stage
    fits: list[dict[int, int]]  # by forecast: context -> sequences that fit together
    commands: list[str]  # to start it: one per node

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "possible": self.settings is not None}
        fits = values.pop("fits")
        for found, row, each in zip(self.forecasts, values["forecasts"], fits, strict=True):
            row["sequences"] = each
            row |= {"fits": found.fits, "kv_tokens": found.kv_tokens, "prompt_ms": found.prompt_ms}
            row["stages"] = [_plain(stage) for stage in row["stages"]]
        return values


def plan_layouts(
    model: PlannedModel,
    cluster: Cluster,
    choices: EngineConfig | None = None,
    *,
    batches: Sequence[int] = (1, 32),
    prompt: int = 8192,
    only: Sequence[tuple[int, int]] = (),
) -> LayoutPlan:
    """Every layout of `cluster`, or `only` these; `choices` with tp and pp name the one shown."""
    config, sizes = model.config, model.rank_sizes
    choices = replace(choices or EngineConfig(), device="cuda")
    cluster = cluster.using(choices.comm)
    geometry = resolve(choices, config, has_gpu=True, memory_bytes=2**62).geometry(config)
    asked = None if choices.tp == "auto" else (choices.tp, choices.pp)
    wanted = list(only) or layouts(config, cluster, choices)
    if asked is not None and asked not in wanted:
        sizes.layout(*asked, choices)  # refuses what the model cannot do
        if asked[0] * asked[1] > cluster.gpus:
            raise OptionError(
                f"tp {asked[0]} x pp {asked[1]} needs {asked[0] * asked[1]} GPUs, found "
                f"{cluster.gpus}; raise --gpus or lower tp or pp"
            )
        wanted.append(asked)
    figures = batches, prompt, choices
    found = [forecast(sizes, cluster, geometry, tp, pp, *figures) for tp, pp in wanted]
    best, reason = recommend_for(found, sizes, cluster, choices)
    contexts = (choices.max_context,) if choices.max_context else CONTEXTS
    each = [sizes.layout(f.tp, f.pp, choices) for f in found]
    same = sizes, cluster, geometry, choices.activations
    fits = [{n: sequences_that_fit(*same, one, n) for n in contexts} for one in each]
    least = min(found, key=lambda f: max(stage.weight_bytes for stage in f.stages))
    shown = asked or ((best or least).tp, (best or least).pp)
    layout = sizes.layout(*shown, choices)
    settings, state = None, 0
    try:
        memory = stage_memory(sizes, layout, cluster, choices)
        run = replace(choices, tp=shown[0], pp=shown[1])
        settings = resolve(run, config, has_gpu=True, memory_bytes=0, stages=memory)
        share = settings.home_share
        held = share.geometry(config)
        limits = share.max_context, share.max_sequences, share.state_tokens
        state = max(replace(held, layers=layers).state_bytes(*limits) for layers, _ in memory)
    except CapacityError as error:
        reason = f"{reason}; {error}" if asked else reason
    stages = list(_ledger(*same, layout))
    return LayoutPlan(
        model.name, model.weights, cluster, found, (best.tp, best.pp) if best else None,
        reason, shown, stages, settings, state, fits,
        serve_commands(*shown, cluster, choices),
    )  # fmt: skip


def sequences_that_fit(
    sizes: WeightSizes,
    cluster: Cluster,
    geometry: Geometry,
    activations: str,
    layout: RankLayout,
    context: int,
) -> int:
    """How many sequences of this context the fullest stage has room for."""
    most = MOST_SEQUENCES
    scores = score_bytes(sizes.config, geometry.chunk_tokens, context)
    stages = rank_stages(sizes, cluster, layout, activations=activations)
    for stage, (_, _, free) in enumerate(stages):
        layers = replace(layout, rank=stage * layout.tp).layers(sizes.config)
        held = replace(geometry, layers=layers)
        most = min(most, layout.homes * most_sequences(held, context, free - scores))
    return most


def _ledger(
    sizes: WeightSizes,
    cluster: Cluster,
    geometry: Geometry,
    activations: str,
    layout: RankLayout,
) -> Iterator[StageLedger]:
    config, known = sizes.config, parameters(sizes.config)
    stages = rank_stages(sizes, cluster, layout, activations=activations)
    for stage, (_, exchange, free) in enumerate(stages):
        own = replace(layout, rank=stage * layout.tp)
        layers = own.layers(config)
        part = replace(geometry, layers=layers)
        groups: dict[str, int] = {}
        parts = held_parts(config, sizes.nbytes, own)
        for name, nbytes in parts.items():
            groups[known[name].group] = groups.get(known[name].group, 0) + nbytes
        yield StageLedger(
            layers=(layers.start, layers.stop),
            weight_bytes=groups,
            shared_bytes=sum(n for name, n in parts.items() if n < sizes.nbytes[name]),
            exchange_bytes=exchange,
            step_bytes=step_bytes(cluster.memory, config, activations=activations),
            free_bytes=free,
            token_bytes=sum(part.bytes_per_token(pool) for pool in POOLS),
            sequence_bytes=part.sequence_bytes(0),
        )


def serve_commands(tp: int, pp: int, cluster: Cluster, choices: EngineConfig) -> list[str]:
    """For the first node, and for every other one."""
    command = f"dsv4 serve MODEL {layout_options(tp, pp, cluster)}".rstrip()
    for name in ("experts", "attention", "comm"):
        if (given := getattr(choices, name)) != getattr(EngineConfig, name):
            command += f" --{name} {given}"
    if tp * pp <= cluster.per_node:
        return [command]
    joins = [f"dsv4 join HOST:PORT --node {node}" for node in range(1, cluster.nodes)]
    return [f"{command} --head HOST:PORT", *joins]


def layout_options(tp: int, pp: int, cluster: Cluster) -> str:
    """Of `serve`; ranks that do not fit one node are on all of them."""
    nodes = cluster.nodes if tp * pp > cluster.per_node else 1
    wanted = {"tp": tp, "pp": pp, "nodes": nodes}
    return " ".join(f"--{name} {n}" for name, n in wanted.items() if n > 1)


def exchange_ms(model: str, cluster: Cluster, layout: RankLayout, rows: int) -> float:
    """Exchanges in all layers of a step with this many rows."""
    config = ModelConfig.builtin(model)
    return layer_exchange_ms(cluster, layout, config, rows) * config.num_layers


def assumptions(cluster: Cluster) -> list[str]:
    """The constants behind the times, with their source."""
    gpu, links = cluster.gpu, {cluster.link.name: cluster.link}
    if cluster.nodes > 1:
        links |= {cluster.between.name: cluster.between}
    lines = [
        f"{gpu.name}: {READ_SHARE:.0%} of {gpu.read_gbs:g} GB/s, {COMPUTE_SHARE:.0%} of "
        f"{gpu.tflops:g} TFLOP/s and {LAYER_US:g} us a layer, the shares as fitted to records of "
        "an H200; weights are read once a step, state is not counted",
        f"a rank of several: {RANK_US:g} us more a layer of 4,096 columns, and exchanged bytes at "
        f"{HANDLED_SHARE * gpu.read_gbs:.0f} GB/s, fitted to slices of one on an H200",
    ]
    return lines + [_link_text(link, cluster) for link in links.values()]


def _link_text(link: Interconnect, cluster: Cluster) -> str:
    by = f"{link.exchange_us:g} us an exchange by NCCL"
    if link.store_us is not None:
        nccl = f"; NCCL, between nodes, takes {link.exchange_us:g}" if cluster.nodes > 1 else ""
        by = f"{link.store_us:g} us an exchange by stores into peers' memory{nccl}"
    return f"{link.name}: {link.gbs:g} GB/s, {by} ({link.source})"


def _plain(stage: dict[str, Any]) -> dict[str, Any]:
    layers: range = stage["layers"]
    return {**stage, "layers": (layers.start, layers.stop)}


def measured(model: str, gpu: str, tp: int, pp: int, attention: str = "tp") -> str | None:
    """Name of the newest record of a run with this layout, or None."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {tuple(key): record for *key, record in rows}.get((model, gpu, tp, pp, attention))
