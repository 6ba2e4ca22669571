"""An engine's layout: as asked, or with tp=auto as the forecast recommends. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4.config import EngineConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.parallel.layout import RankLayout
from dsv4.runner.ranks.cluster import (
    LINKS,
    PCIE5_GBS,
    Cluster,
    GpuRates,
    measured_rates,
    published_rates,
)
from dsv4.runner.ranks.forecast import (
    ALONE,
    ANSWER_TOKENS,
    ANSWERS,
    CHUNK,
    ERROR,
    PROMPT_TOKENS,
    SEQUENCES,
    Forecast,
    WeightSizes,
    forecast,
    layouts,
    rank_stages,
)
from dsv4.runner.settings import StageMemory, resolve
from dsv4.util.measured_gpu import load_measured
from dsv4.util.sizes import size_text

ONE_STREAM = 0.95  # a layout this much faster for one stream is named along with the best
UNKNOWN = GpuRates("unknown GPU", 0.0, 1000, 200, "pcie")  # only comparisons depend on it


@dataclass(frozen=True)
class Devices:
    """The GPUs that CUDA shows on this node. `memory`: free bytes of the smallest; `peers`: whether
    each can write to every other's memory, None: as is assumed of their link."""

    count: int
    name: str
    memory: int
    peers: bool | None = None

    def cluster(self, nodes: int, comm: str = "auto") -> Cluster:
        """A cluster of `nodes` nodes like this one, as an engine with this `comm` uses it."""
        rates = published_rates(self.name)
        if rates is None:
            measured = load_measured().get(self.name)
            rates = measured_rates(measured) if measured else UNKNOWN
        link = rates.link
        if "pcie" in self.name.lower() and link == "nvlink":  # the card, not the module
            link = "pcie" if rates.bus_gbs == PCIE5_GBS else "pcie4"
        peers = False if comm == "nccl" else self.peers
        between = LINKS[link].with_peers(peers)
        return Cluster(rates, self.count * nodes, nodes, self.memory, between)


@dataclass(frozen=True)
class LayoutChoice:
    tp: int
    pp: int
    why: str = ""  # only if chosen here


def choose_layout(
    choices: EngineConfig, sizes: WeightSizes, devices: Devices | None
) -> LayoutChoice:
    """`devices`: None on a CPU. A GPU given by name is used alone; several nodes use all GPUs."""
    nodes = choices.nodes
    if choices.tp != "auto":
        return LayoutChoice(choices.tp, choices.pp)
    is_named = choices.device.startswith("cuda:")
    if devices is None or is_named or devices.count * nodes == 1:
        return LayoutChoice(1, choices.pp)
    cluster, config = devices.cluster(nodes, choices.comm), sizes.config
    roomy = resolve(choices, config, has_gpu=True, memory_bytes=2**62)
    found = [
        forecast(sizes, cluster, roomy.geometry(config), tp, pp, how=choices)
        for tp, pp in layouts(config, cluster, choices)
        if choices.pp in (1, pp) and (nodes == 1 or tp * pp == cluster.gpus)
    ]
    if not found:
        raise OptionError(
            f"pp is {choices.pp}, {cluster.gpus} GPUs cannot be shared so; give tp, too"
        )
    best, why = recommend_for(found, sizes, cluster, choices)
    if best is None:
        raise CapacityError(why)
    text = f"chosen tp {best.tp}, pp {best.pp} on {best.world} of {cluster.gpus} GPUs: {why}"
    return LayoutChoice(best.tp, best.pp, text)


def recommend_for(
    found: Sequence[Forecast], sizes: WeightSizes, cluster: Cluster, choices: EngineConfig
) -> tuple[Forecast | None, str]:
    """The layout to run and why, among those with room for the sequences and context that `choices`
    ask for: stages divide the state, ranks of one stage all hold it."""
    alone = [each for each in found if each.pp == 1 and each.fits]
    if alone and (choices.prefix_disk is not None or choices.draft == "lookup"):
        found = alone  # the only layouts that can do this
    best, why = recommend(found, cluster)
    if best is None or (choices.max_sequences is None and choices.max_context is None):
        return best, why

    def refusal(of: Forecast) -> CapacityError | None:
        try:
            layout = sizes.layout(of.tp, of.pp, choices)
            asked = replace(choices, tp=of.tp, pp=of.pp)
            memory = stage_memory(sizes, layout, cluster, choices)
            resolve(asked, sizes.config, has_gpu=True, memory_bytes=0, stages=memory)
        except CapacityError as error:
            return error
        return None

    refused = refusal(best)
    if refused is None:
        return best, why
    able = [each for each in found if refusal(each) is None]
    other, why = recommend(able, cluster) if able else (None, "no layout has room for that")
    return other, f"{why}; not tp {best.tp}, pp {best.pp}: {refused}"


def recommend(forecasts: Sequence[Forecast], cluster: Cluster) -> tuple[Forecast | None, str]:
    """The layout to run, and why; None if nothing fits. Of layouts that forecasts cannot tell apart
    the one with the fewest stages, which do without prefixes on disk and drafts."""
    fitting = [found for found in forecasts if found.fits]
    if not fitting:
        least = min(forecasts, key=lambda f: max(s.weight_bytes for s in f.stages))
        most = max(stage.weight_bytes for stage in least.stages)
        return None, (
            f"no layout fits: the smallest share of the weights is {size_text(most)} a GPU (tp "
            f"{least.tp}, pp {least.pp}), a GPU has {size_text(cluster.memory)}; use more of them "
            "or smaller weights"
        )
    inside = [found for found in fitting if found.world <= cluster.per_node] or fitting
    least = min(inside, key=lambda found: (found.job_s, found.world))
    close = [found for found in inside if found.job_s <= least.job_s * (1 + ERROR)]
    best = min(close, key=lambda found: (found.pp, found.job_s, found.world))
    why = "the only layout that fits"
    if len(fitting) > 1:
        why = (
            f"{ANSWERS} answers of {ANSWER_TOKENS} tokens to prompts of {PROMPT_TOKENS:,} at once "
            f"and {ALONE} one by one in {best.job_s:.1f} s, "
        )
        why += (
            f"the least of {len(fitting)} layouts that fit"
            if best is least
            else f"of the layouts within {ERROR:.0%} of the least (tp {least.tp}, pp {least.pp}: "
            f"{least.job_s:.1f} s) the one with the fewest stages"
        )
    if cluster.nodes > 1 and best.world <= cluster.per_node:
        why += "; one engine on each node, behind a router"
    if 1 in best.steps:
        quick = min(inside, key=lambda found: found.steps[1].total)
        if quick.steps[1].total < ONE_STREAM * best.steps[1].total:
            why += (
                f"; for one stream alone tp {quick.tp}, pp {quick.pp}: "
                f"{quick.steps[1].total:.1f} ms a token instead of {best.steps[1].total:.1f}"
            )
    return best, why


def stage_memory(
    sizes: WeightSizes, layout: RankLayout, cluster: Cluster, choices: EngineConfig
) -> Sequence[StageMemory]:
    """Layers of each stage, and the bytes that weights and a step leave free on its GPUs."""
    chunk = min(choices.chunk_tokens or CHUNK, choices.max_context or sizes.config.max_positions)
    memory, most = [], (chunk, choices.max_sequences or SEQUENCES, choices.activations)
    for stage, (weights, exchange, free) in enumerate(rank_stages(sizes, cluster, layout, *most)):
        if free <= 0:
            raise CapacityError(
                f"a rank of stage {stage} has {size_text(weights)} of weights and "
                f"{size_text(exchange)} for exchanges; a GPU has {size_text(cluster.memory)} "
                "free; raise tp or pp, see dsv4 plan"
            )
        layers = replace(layout, rank=stage * layout.tp).layers(sizes.config)
        memory.append((layers, free))
    return memory
