"""The places where the engine calls an op, in the order of a layer: the rows of the picture.

For each: which op, which of its arguments are results of earlier ops, and what the others must be.
This distinguishes a wrong kernel from a correct kernel with wrong arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.core.op import AnyOp, Arguments
from dsv4.ops.kv.compress import Compression
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.kv.pool import PagedPool, load, locate
from dsv4.tools.doctor.plain.layer import PlainLayer, Taps


@dataclass(frozen=True)
class ExpectedWeight:
    """An argument that must be this stored weight."""

    name: str
    expert: int | None = None


@dataclass(frozen=True)
class OpCall:
    """One op call: the arguments before it, and its result."""

    layer: int
    station: "Station"
    op: AnyOp
    before: Arguments
    after: Arguments  # the op's own argument objects, including its in-place writes
    result: Any


Expected = dict[str, Any]  # path of an argument -> number, tensor or ExpectedWeight


@dataclass(frozen=True)
class Station:
    name: str
    op: str
    run: Callable[[PlainLayer, Taps], dict[str, Tensor]]
    taps: tuple[str, ...]  # the op's results, in order; empty: they are read from the state
    inputs: dict[str, str] = field(default_factory=dict)  # argument -> the tap it must equal
    arguments: Callable[[PlainLayer, Taps], Expected] = lambda layer, t: {}
    kinds: tuple[int, ...] = (0, 4, 128)  # ratios of the layers that have it
    judged_later: tuple[str, ...] = ()  # numbers that matter more at a later station


def _mix(half: str) -> Callable[[PlainLayer, Taps], Expected]:
    norm = "norm.weight" if half == "head" else f"{half}_norm.weight"

    def expected(layer: PlainLayer, t: Taps) -> Expected:
        c = layer.config
        return {
            **{
                f"site.{part}": ExpectedWeight(f"hc_{half}_{part}")
                for part in ("fn", "base", "scale")
            },
            "site.norm": ExpectedWeight(norm),
            "site.eps": c.rms_norm_eps,
            "site.hc_eps": c.hc_eps,
            "site.sinkhorn_iters": c.hc_sinkhorn_iters,
        }

    return expected


def _mixed(half: str) -> dict[str, str]:
    """The taps that streams and update come from."""
    update = {f"update.{name}": f"{half}_{name}" for name in ("y", "post", "comb")}
    return {"streams": f"{half}_streams", **update}


def _matrices(names: dict[str, str]) -> Expected:
    return {f"weights.{place}": ExpectedWeight(name) for place, name in enumerate(names.values())}


def _turned(layer: PlainLayer, t: Taps) -> Expected:
    return {"positions": t.positions, "frequencies": layer.table}


def _stored(layer: PlainLayer, t: Taps, under: str) -> Expected:
    return {
        f"{under}.batch.positions": t.positions,
        f"{under}.frequencies": layer.table,
        f"{under}.eps": layer.config.rms_norm_eps,
    }


def _compressed(under: str) -> Callable[[PlainLayer, Taps], Expected]:
    return lambda layer, t: {
        **_stored(layer, t, "block"),
        "block.ratio": layer.ratio,
        "block.ape": ExpectedWeight(f"attn.{under}ape"),
        "block.norm": ExpectedWeight(f"attn.{under}norm.weight"),
    }


def _experts(layer: PlainLayer, t: Taps) -> Expected:
    expected: Expected = {"by.limit": layer.config.swiglu_limit}
    for name in ("w13", "w2"):
        expected[f"by.shared_{name}"] = ExpectedWeight(f"ffn.shared_experts.{name}")
        for number in sorted(set(t.new["experts"].flatten().tolist())):
            expected[f"by.{name}.{number}"] = ExpectedWeight(f"ffn.experts.{name}", number)
    return expected


def _router(layer: PlainLayer, t: Taps) -> Expected:
    c = layer.config
    hashed = layer.layer < c.num_hash_layers
    return {
        "by.gate": ExpectedWeight("ffn.gate.weight"),
        **(
            {"by.table": ExpectedWeight("ffn.gate.tid2eid")}
            if hashed
            else {"by.bias": ExpectedWeight("ffn.gate.bias")}
        ),
        "token_ids": t.token_ids,
        "by.num_chosen": c.num_experts_per_tok,
        "by.scaling": c.routed_scaling_factor,
    }


_L = PlainLayer
STATIONS: dict[str, Station] = {
    station.name: station
    for station in (
        Station("embed", "embed", _L.embed, ("embedded",), {},
            lambda layer, t: {"table": ExpectedWeight("embed.weight"), "token_ids": t.token_ids,
                "num_streams": layer.config.hc_mult}, ()),
        Station("mix_attention", "mhc_boundary", _L.mix_attention,
            ("attn_streams", "attn_x", "attn_post", "attn_comb"), _mixed("before"), _mix("attn")),
        Station("project", "linear", _L.project, (), {"x": "attn_x"},
            lambda layer, t: _matrices(layer.input_matrices)),
        Station("window_key", "kv_store", _L.window_key, ("key",), {"key.kv": "kv_raw"},
            lambda layer, t: {**_stored(layer, t, "key"),
                "key.norm": ExpectedWeight("attn.kv_norm.weight")}),
        Station("latent_norm", "rms_norm", _L.latent_norm, ("latent",), {"x": "latent_raw"},
            lambda layer, t: {"weight": ExpectedWeight("attn.q_norm.weight"),
                "eps": layer.config.rms_norm_eps}),
        Station("query", "linear", _L.query, (), {"x": "latent"},
            lambda layer, t: _matrices(layer.query_matrices)),
        Station("entries", "compress", _L.entries, ("entries",),
            {"block.values": "values", "block.gates": "gates"}, _compressed("compressor."),
            (4, 128)),
        Station("index_keys", "compress", _L.index_keys, ("index_keys",),
            {"block.values": "index_values", "block.gates": "index_gates"},
            _compressed("indexer.compressor."), (4,)),
        Station("index_query", "index_query", _L.index_query, ("index_q",), {"q": "index_q_raw"},
            lambda layer, t: {**_turned(layer, t), "index_format": layer.formats.index}, (4,)),
        Station("index_scores", "index_scores", _L.index_scores, ("scores",), {"q": "index_q"},
            lambda layer, t: {"to.batch.positions": t.positions, "to.topk": layer.config.index_topk,
                "weights": t.new["head_weights"] * layer.index_scale}, (4,),
            judged_later=("to.topk",)),  # a smaller one only scores more rows
        Station("index_select", "index_select", _L.index_select, ("selected",),
            {"scores": "scores"}, lambda layer, t: {"topk": layer.config.index_topk}, (4,)),
        Station("query_prepare", "query_prepare", _L.query_prepare, ("q",), {"q": "q_raw"},
            lambda layer, t: {**_turned(layer, t), "eps": layer.config.rms_norm_eps}),
        Station("attention", "attention", _L.attention, ("attended",),
            {"q": "q", "to.compressed.selected": "selected"},
            lambda layer, t: {"to.window": layer.config.sliding_window,
                "to.batch.positions": t.positions, "to.frequencies": layer.table,
                "to.sink": ExpectedWeight("attn.attn_sink"),
                **({"to.compressed.ratio": layer.ratio} if layer.ratio else {})}),
        Station("output_groups", "grouped_linear", _L.output_groups, ("low",), {"x": "attended"},
            lambda layer, t: {"weight": ExpectedWeight("attn.wo_a.weight")}),
        Station("output", "linear", _L.output, ("attn_y",), {"x": "low"},
            lambda layer, t: {"weights.0": ExpectedWeight("attn.wo_b.weight")}),
        Station("mix_ffn", "mhc_boundary", _L.mix_ffn,
            ("ffn_streams", "ffn_x", "ffn_post", "ffn_comb"), _mixed("attn"), _mix("ffn")),
        Station("router", "router", _L.router, ("experts", "expert_weights"), {"x": "ffn_x"},
            _router),
        Station("experts", "experts", _L.experts, ("ffn_y",),
            {"x": "ffn_x", "experts": "experts", "weights": "expert_weights"}, _experts),
        Station("head_mix", "mhc_head", _L.head_mix, ("head_x",), _mixed("ffn"), _mix("head"), ()),
        Station("head", "linear", _L.head, ("logits",), {"x": "head_x"},
            lambda layer, t: {"weights.0": ExpectedWeight("head.weight")}, ()),
    )
}  # fmt: skip


def layer_stations(layer: PlainLayer) -> list[Station]:
    """The stations of one layer, in order; the first layer adds `embed`, the last the head."""
    last = layer.config.num_layers - 1
    found = [station for station in STATIONS.values() if layer.ratio in station.kinds]
    if layer.layer == 0:
        found.insert(0, STATIONS["embed"])
    return found + ([STATIONS["head_mix"], STATIONS["head"]] if layer.layer == last else [])


def pick(arguments: Any, path: str) -> Any:
    """`compressed.ratio` or `weights.0` of an op's arguments; None if the path ends early."""
    value = arguments
    for part in path.split("."):
        if value is None:
            return None
        if isinstance(value, dict):
            value = value.get(part)
        elif part.isdigit():
            size = len(value) if isinstance(value, list | tuple) else value.shape[0]
            value = value[int(part)] if int(part) < size else None
        else:
            value = getattr(value, part)
    return value


def results(
    call: OpCall, layer: PlainLayer, taps: Taps, place: int = 0, first_row: int = 0
) -> dict[str, Tensor]:
    """The engine's taps for sequence `place` of the step; its rows start at `first_row`."""
    station, arguments = call.station, call.after
    if station.op == "kv_store":
        key: WindowKey = arguments["key"]
        return {"key": read_entries(key.pool, key.table, place, taps.positions)}
    if station.op == "compress":
        return _compressor_results(station, arguments["block"], layer, taps, place)
    names = station.taps
    if station.name == "project":
        names = tuple(layer.input_matrices)
    elif station.name == "query":
        names = tuple(layer.query_matrices)
    elif station.name == "mix_attention" and layer.layer == 0:
        names = names[1:]  # the streams are the embedding
    values = list(call.result) if isinstance(call.result, list | tuple) else [call.result]
    rows = slice(first_row, first_row + taps.stop - taps.start)
    found = {name: _wide(value[rows]) for name, value in zip(names, values, strict=False)}
    if station.name == "index_scores":
        width = taps.stop // 4
        found["scores"] = found["scores"][:, :width].masked_fill(~layer.scored(taps), 0.0)
    if station.name == "index_select":
        missing = layer.config.index_topk - found["selected"].shape[1]
        found["selected"] = torch.nn.functional.pad(found["selected"], (0, missing), value=-1)
    return found


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _compressor_results(
    station: Station, block: Compression, layer: PlainLayer, taps: Taps, place: int
) -> dict[str, Tensor]:
    """Entries closed in this step as later reads see them, and the stored tail."""
    blocks = torch.arange(taps.start // layer.ratio, taps.stop // layer.ratio)
    state, last = block.state, layer.tail(taps)
    slot, rows = int(block.batch.slots[place]), last % state.rows
    tail = torch.cat((state.values[slot, rows], state.gates[slot, rows]), dim=1)
    name = station.taps[0]
    entries = read_entries(block.pool, block.table, place, blocks)
    return {name: entries, f"{name}_tail": tail.double()}


def read_entries(pool: PagedPool, table: Tensor, place: int, numbers: Tensor) -> Tensor:
    """A sequence's state as later reads see it."""
    numbers = numbers.to(table.device)
    if numbers.numel() == 0:
        return torch.zeros(0, pool.dim, dtype=torch.float64, device=table.device)
    sequence = torch.full_like(numbers, place)
    return load(pool, *locate(table, sequence, numbers, pool.page_entries)).double()
