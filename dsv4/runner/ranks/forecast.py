"""Forecasts a layout's cost before anyone has run it: bytes per rank, room for state, and step
time. No torch.

A decode step reads its weights once, pays a fixed time per layer, and exchanges. The shares of a
GPU's published rates and the time per layer are fitted to records of one H200
(benchmarks/records/2026-11-17_h200_decode_flash.jsonl, ..._decode_pro.jsonl, ..._prefill.jsonl).
The time on the link between ranks is assumed until someone measures it: `dsv4 bench parallel`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from dsv4.cache.geometry import POOLS, Geometry
from dsv4.checkpoint.names import parameters
from dsv4.checkpoint.rank_slices import held_parts
from dsv4.config import EngineConfig, ModelConfig
from dsv4.parallel.channels import exchange_bytes
from dsv4.parallel.layout import RankLayout, allowed_tp, balance
from dsv4.runner.ranks.cluster import Cluster
from dsv4.runner.ranks.exchange_times import (
    boundaries_ms,
    group_link,
    layer_exchange_ms,
    rank_layer_ms,
    received_bytes,
    transfer_ms,
)
from dsv4.runner.settings import GPU_CHUNK, GPU_SEQUENCES, step_bytes

READ_SHARE, COMPUTE_SHARE, LAYER_US = 0.74, 0.41, 53.0
ERROR = 0.15  # of forecasts, against those records
CHUNK = GPU_CHUNK  # prompt tokens of a step
LEAST_TOKENS, SEQUENCES = 32768, GPU_SEQUENCES  # of state, for a layout to be useful
# the workload that layouts are compared by: a batch of answers, and some one by one
ANSWERS, ALONE, ANSWER_TOKENS, PROMPT_TOKENS = 32, 4, 256, 2048
_SHARED = ("attn.wq_b.weight", "attn.wo_a.weight", "attn.wo_b.weight", "attn.attn_sink")
HOW = EngineConfig()
DRAWS = 200  # of experts, to estimate how many the fullest rank reads


@dataclass(frozen=True)
class WeightSizes:
    """A model's parameters: canonical name -> bytes of the whole parameter on a GPU."""

    config: ModelConfig
    nbytes: Mapping[str, int]

    def layout(self, tp: int, pp: int, how: EngineConfig = HOW) -> RankLayout:
        """Rank 0's layout; stages are balanced by layer bytes. `how`: experts, attention."""
        split, data_attention = how.experts == "split", how.attention == "dp"
        layout = RankLayout(tp, pp, 0, self._stages(pp), split, data_attention)
        layout.check(self.config)
        return layout

    def held(self, layout: RankLayout) -> int:
        """Bytes that a rank holds."""
        held = self._rank_bytes(layout.tp, layout.split_experts, layout.data_attention)
        names = [f"layers.{layer}." for layer in layout.layers(self.config)]
        if layout.is_first:
            names.append("embed.weight")
        return sum(held[name] for name in names) + layout.is_last * held[""]

    def read(self, layout: RankLayout, batch: int) -> float:
        """Bytes that the fullest rank of a stage reads in a decode step."""
        c, total = self.config, 0.0
        heads_over = 1 if layout.data_attention else layout.tp
        experts = experts_read(c, layout, batch) / c.num_experts
        for layer in layout.layers(c):
            whole, shared, routed = self._layers[layer]
            total += whole + shared / heads_over + routed * experts
        if layout.is_last:
            head = self.nbytes["head.weight"]
            total += self._last - head + head / layout.tp
        return total

    @cached_property
    def _stages(self) -> Callable[[int], tuple[range, ...]]:
        """By pp: which layers are whose."""
        costs = [sum(part) for part in self._layers]
        return cache(lambda pp: balance(costs, pp, self.nbytes["embed.weight"], self._last))

    @cached_property
    def _layers(self) -> list[tuple[int, int, int]]:
        """Bytes of each layer: read whole by every rank, divided among ranks, routed experts."""
        found = [[0, 0, 0] for _ in range(self.config.num_layers)]
        for name, nbytes in self.nbytes.items():
            if name.startswith("layers."):
                _, layer, part = name.split(".", 2)
                kind = 2 if part.startswith("ffn.experts.") else 1 if part in _SHARED else 0
                found[int(layer)][kind] += nbytes
        return [(a, b, c) for a, b, c in found]

    @cached_property
    def _last(self) -> int:
        """Bytes after the last layer."""
        names = (name for name in self.nbytes if not name.startswith("layers."))
        return sum(self.nbytes[name] for name in names if name != "embed.weight")

    @cached_property
    def _rank_bytes(self) -> Callable[[int, bool, bool], dict[str, int]]:
        """By tp: bytes on a rank of each layer, of the embedding, and under "" of the rest."""

        @cache
        def of(tp: int, split: bool, data_attention: bool) -> dict[str, int]:
            found: Counter[str] = Counter()
            layout = RankLayout(tp, split_experts=split, data_attention=data_attention)
            for name, nbytes in held_parts(self.config, self.nbytes, layout).items():
                is_layer = name.startswith("layers.")
                key = f"layers.{name.split('.')[1]}." if is_layer else ""
                found[name if name == "embed.weight" else key] += nbytes
            return dict(found)

        return of


@dataclass(frozen=True)
class StepTime:
    """Milliseconds in which every sequence gets a token."""

    read: float
    layers: float
    exchange: float

    @property
    def total(self) -> float:
        return self.read + self.layers + self.exchange


@dataclass(frozen=True)
class StageForecast:
    """One rank of a stage."""

    layers: range
    weight_bytes: int
    exchange_bytes: int
    free_bytes: int  # for state
    kv_tokens: int


@dataclass(frozen=True)
class Forecast:
    tp: int
    pp: int
    stages: tuple[StageForecast, ...]
    steps: dict[int, StepTime]  # by batch
    prompt_compute_ms: float
    prompt_exchange_ms: float
    prompt_bound: str
    layer_mb: dict[int, float]  # received by a rank in a layer, by rows
    fullest: dict[int, float]  # experts read on the fullest rank, by batch
    job_s: float  # for the workload that layouts are compared by
    homes: int = 1  # ranks of a tensor group with sequences of their own

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def attention(self) -> str:
        return "dp" if self.homes > 1 else "tp"

    @property
    def kv_tokens(self) -> int:
        """Tokens of all sequences together that the fullest stage has room for."""
        return min(stage.kv_tokens for stage in self.stages)

    @property
    def fits(self) -> bool:
        """A sequence has all its state at one home."""
        return self.kv_tokens >= LEAST_TOKENS * self.homes

    @property
    def prompt_ms(self) -> float:
        return self.prompt_compute_ms + self.prompt_exchange_ms


def layouts(
    config: ModelConfig, cluster: Cluster, how: EngineConfig = HOW
) -> list[tuple[int, int]]:
    """(tp, pp) that use all GPUs or a part that divides them; tensor groups, which exchange in
    every layer, span nodes only if a node has too few GPUs."""
    found, data_attention = [], how.attention == "dp"
    for tp in allowed_tp(config, data_attention=data_attention)[data_attention:]:
        for pp in range(1, min(cluster.gpus // tp, config.num_layers) + 1):
            inside = tp * pp <= cluster.per_node and cluster.per_node % (tp * pp) == 0
            spans = tp * pp == cluster.gpus and (
                cluster.per_node % tp == 0 or tp % cluster.per_node == 0
            )
            if inside or spans:
                found.append((tp, pp))
    return found


def forecast(
    sizes: WeightSizes,
    cluster: Cluster,
    geometry: Geometry,
    tp: int,
    pp: int,
    batches: Sequence[int] = (1, 32),
    prompt: int = 8192,
    how: EngineConfig = HOW,
) -> Forecast:
    layout = sizes.layout(tp, pp, how)
    steps = {batch: _step(sizes, cluster, layout, batch) for batch in {*batches, 1, ANSWERS}}
    compute, exchange, bound = _prompt(sizes, cluster, layout, prompt)
    chunk, config, comm = CHUNK // layout.homes, sizes.config, cluster.comm(layout.world)
    chunks, all_chunks = -(-prompt // chunk), -(-prompt // CHUNK)
    together = sum(_prompt(sizes, cluster, layout, prompt, at_all_homes=True)[:2]) / all_chunks
    job = together * _overlapped(ANSWERS * PROMPT_TOKENS // CHUNK, pp)
    job += ALONE * (compute + exchange) / chunks * _overlapped(PROMPT_TOKENS // chunk, pp)
    job += ANSWER_TOKENS * (steps[ANSWERS].total + ALONE * steps[1].total)
    shown = _overlapped(chunks, pp) / chunks
    return Forecast(
        tp, pp,
        tuple(_stages(sizes, cluster, geometry, layout, how)),
        {batch: steps[batch] for batch in batches},
        compute * shown,
        exchange * shown,
        bound,
        {rows: received_bytes(config, layout, rows, comm) / 1e6 for rows in (*batches, prompt)},
        {batch: experts_read(config, layout, batch) for batch in batches},
        job / 1e3,
        layout.homes,
    )  # fmt: skip


# --- bytes ----------------------------------------------------------------------------------------


def rank_stages(
    sizes: WeightSizes,
    cluster: Cluster,
    layout: RankLayout,
    chunk_tokens: int = CHUNK,
    max_sequences: int = SEQUENCES,
    activations: str = "auto",
) -> Iterator[tuple[int, int, int]]:
    """For a rank of each stage: bytes of weights, for exchanges, and left over."""
    steps = chunk_tokens, max_sequences, cluster.comm(layout.world)
    room = cluster.memory - step_bytes(cluster.memory, sizes.config, chunk_tokens, activations)
    for first in (replace(layout, rank=stage * layout.tp) for stage in range(layout.pp)):
        held, exchange = sizes.held(first), exchange_bytes(sizes.config, first, *steps)
        yield held, exchange, room - held - exchange


def _stages(
    sizes: WeightSizes, cluster: Cluster, geometry: Geometry, layout: RankLayout, how: EngineConfig
) -> Iterator[StageForecast]:
    config, stages = sizes.config, rank_stages(sizes, cluster, layout, activations=how.activations)
    for stage, (held, exchange, free) in enumerate(stages):
        layers = replace(layout, rank=stage * layout.tp).layers(config)
        part = replace(geometry, layers=layers)
        room = free - part.sequence_bytes(0) * SEQUENCES // layout.homes
        growth = sum(part.bytes_per_token(pool) for pool in POOLS)
        most = config.max_positions * SEQUENCES  # window-only layers: any length
        tokens = min(int(room * layout.homes / growth) if growth else most, most)
        yield StageForecast(layers, held, exchange, free, max(tokens, 0) if room > 0 else 0)


def experts_read(config: ModelConfig, layout: RankLayout, batch: int) -> float:
    """By the fullest rank in one layer of a step, counted in whole experts."""
    shape = config.num_experts, config.num_experts_per_tok, batch
    return visited(*shape, 1) / layout.tp if layout.split_experts else visited(*shape, layout.tp)


@cache
def visited(num_experts: int, chosen: int, batch: int, tp: int) -> float:
    """Distinct experts that a step reads on the fullest rank, with random routing."""
    rng, total = random.Random(0), 0
    share = num_experts // tp
    for _ in range(DRAWS):
        found: set[int] = set()
        for _ in range(batch):
            found.update(rng.sample(range(num_experts), chosen))
        counts = [0] * tp
        for expert in found:
            counts[expert // share] += 1
        total += max(counts)
    return total / DRAWS


# --- times ----------------------------------------------------------------------------------------


def _overlapped(chunks: int, pp: int) -> float:
    """Time of this many chunks, relative to one chunk through all stages: each stage starts the
    next chunk as soon as it has passed on the last."""
    return 1 + (chunks - 1) / pp


def _step(sizes: WeightSizes, cluster: Cluster, layout: RankLayout, batch: int) -> StepTime:
    """Each stage works on an equal share of the sequences: a step takes as long as one share
    through all stages or all shares through the slowest stage, whichever is longer."""
    config, tp = sizes.config, layout.tp
    rate = cluster.gpu.read_gbs * READ_SHARE * 1e6  # bytes in a ms
    lanes = min(layout.pp, batch)
    batch = -(-batch // lanes)
    stages = [replace(layout, rank=stage * tp) for stage in range(layout.pp)]
    reads = [sizes.read(stage, batch) / rate for stage in stages]
    read = max(sum(reads), lanes * max(reads))
    exchange = layer_exchange_ms(cluster, layout, config, batch) * config.num_layers
    if tp > 1:
        logits = batch * config.vocab_size * 4 * (tp - 1) / tp
        exchange += transfer_ms(group_link(cluster, tp), cluster.comm(layout.world), logits)
    exchange += boundaries_ms(cluster, layout, config, batch)
    layer = LAYER_US / 1e3 + rank_layer_ms(cluster, layout, config, batch)
    return StepTime(read, config.num_layers * layer, exchange)


def _prompt(
    sizes: WeightSizes,
    cluster: Cluster,
    layout: RankLayout,
    tokens: int,
    *,
    at_all_homes: bool = False,
) -> tuple[float, float, str]:
    """Compute and exchange in ms, one chunk after the other, and the bottleneck. A prompt runs at
    one of several homes, in smaller chunks; `at_all_homes`: per prompt, if each has one."""
    config, tp = sizes.config, layout.tp
    whole, shared, experts = prompt_flops(config, tokens)
    chunk, flops = CHUNK, whole + (shared + experts) / tp
    if layout.data_attention:
        flops = (whole + shared) / (tp if at_all_homes else 1) + experts / tp
        chunk = CHUNK if at_all_homes else CHUNK // tp
    compute = flops / (cluster.gpu.tflops * COMPUTE_SHARE * 1e9)
    stages = [replace(layout, rank=stage * tp) for stage in range(layout.pp)]
    held = sum(sizes.held(stage) for stage in stages)
    chunks = -(-tokens // chunk)
    read = chunks * held / (cluster.gpu.read_gbs * READ_SHARE * 1e6)
    rows = CHUNK if layout.data_attention else min(tokens, CHUNK)  # homes bring padding
    exchange = layer_exchange_ms(cluster, layout, config, rows) * config.num_layers
    exchange += boundaries_ms(cluster, layout, config, rows)
    bound = "products" if compute > read else "reading weights"
    more = rank_layer_ms(cluster, layout, config, rows) * config.num_layers
    if (exchange + more) * chunks > max(compute, read):
        bound = "exchange"
    return max(compute, read) + more * chunks, exchange * chunks, bound


@cache
def prompt_flops(config: ModelConfig, tokens: int) -> tuple[float, float, float]:
    """(repeated on every rank of a tensor group, divided among them, routed experts)."""
    c, whole, shared, experts = config, 0.0, 0.0, 0.0
    for name, parameter in parameters(c).items():
        if len(parameter.shape) < 2 or parameter.kind == "table" or not name.startswith("layers."):
            continue
        count = 2.0 * tokens
        for size in parameter.shape:
            count *= size
        part = name.split(".", 2)[2]
        if part.startswith("ffn.experts."):
            experts += count * c.num_experts_per_tok / c.num_experts
        elif part.startswith(("attn.compressor", "attn.indexer", "attn.wq_a", "attn.wkv")):
            whole += count
        else:
            shared += count
    for ratio in c.compress_ratios:
        seen = c.sliding_window
        if ratio == 4:
            seen += min(c.index_topk, tokens // 8)
            whole += tokens * tokens / 8 * c.index_num_heads * c.index_head_dim * 2.0
        elif ratio:
            seen += tokens // (2 * ratio)
        shared += 4.0 * tokens * min(seen, tokens) * c.num_heads * c.head_dim
    return whole, shared, experts
