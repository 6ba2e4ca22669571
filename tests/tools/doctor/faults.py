"""Planted bugs, each of a kind that engines for this model have had, and where it sits.

A kernel is planted by changing what runs for an op; a mistake in the model by changing the
model. Nothing of `doctor` knows about any of them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dsv4.ops.attention.attention as attention_op
import dsv4.ops.kv.compress as compress_op
import dsv4.ops.moe.experts as experts_op
from dsv4.cache.geometry import Geometry
from dsv4.ops.attention.index import IndexEntries
from dsv4.ops.core.arguments import copied
from dsv4.ops.core.op import Op
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.kv.pool import load, locate, store
from dsv4.ops.kv.rope import rope_frequencies, rope_reference, yarn_frequencies
from dsv4.ops.mhc.mix import Update
from dsv4.ops.moe.router import Gate
from dsv4.tools.doctor.subject import Subject

Run = Callable[..., Any]  # the right op
TYPED = (
    attention_op.Visible, compress_op.Compression, WindowKey, IndexEntries, Gate,
    experts_op.Experts, Update,
)  # fmt: skip
Plant = Callable[[Subject], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Plant
    layer: int
    station: str
    kind: str  # of the cause
    says: str = ""  # a part of the cause's text
    changes: dict[str, Any] = field(default_factory=dict)  # of the model's config
    choices: dict[str, Any] = field(default_factory=dict)  # of the engine's
    nasty: bool = False


@contextmanager
def kernel(
    op: str, wrong: Callable[..., Any], when: Callable[..., bool] | None = None
) -> Iterator[None]:
    """What runs for `op` becomes `wrong(right, arguments)` wherever `when(arguments)`; the fields
    of an op's typed argument count as arguments."""
    run = Op.run

    def planted(self: Op, device: torch.device, arguments: dict[str, Any]) -> Any:
        typed = {k: v for k, v in arguments.items() if isinstance(v, TYPED)}
        own = {k: {f.name: getattr(v, f.name) for f in fields(v)} for k, v in typed.items()}
        flat = {**arguments, **{k: v for values in own.values() for k, v in values.items()}}
        if self.name != op or (when is not None and not when(flat)):
            return run(self, device, arguments)

        def right(**changes: Any) -> Any:
            given = {**arguments, **{k: v for k, v in changes.items() if k in arguments}}
            for name, value in typed.items():
                changed = {k: v for k, v in changes.items() if k in own[name]}
                given[name] = replace(value, **changed)
            return run(self, device, given)

        return wrong(right, flat)

    with patch.object(Op, "run", planted):
        yield


def in_layer(subject: Subject, layer: int, argument: str, attribute: str) -> Callable[..., bool]:
    """A condition: the call whose `argument` is that weight of the layer."""
    weight: Any = subject.model.blocks[layer].attention
    for part in attribute.split("."):
        weight = getattr(weight, part)
    return lambda a: a[argument] is weight


# --- attention ------------------------------------------------------------------------------------


def query_position(subject: Subject) -> Any:
    frequencies = subject.model.blocks[2].attention.frequencies
    return kernel(
        "query_prepare",
        lambda right, a: right(positions=a["positions"] + 1),
        lambda a: a["frequencies"] is frequencies,
    )


def no_inverse_rope(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Tensor:
        return rope_reference(right(), a["batch"].positions, a["frequencies"], False)

    return kernel("attention", wrong, in_layer(subject, 2, "sink", "sink"))


def sink_ignored(subject: Subject) -> Any:
    return kernel("attention", lambda right, a: right(sink=torch.full_like(a["sink"], -1e9)))


def sink_left_out(subject: Subject) -> Any:
    """In the reference itself, in a layer whose compressor has not closed a block yet."""
    right, sink = attention_op._online_softmax, subject.model.blocks[2].attention.sink

    def wrong(q: Tensor, given: Tensor, *rest: Any) -> Tensor:
        is_here = torch.equal(given[: len(sink)], sink)  # behind it come padding heads
        return right(q, given - 1e9 if is_here else given, *rest)

    return patch.object(attention_op, "_online_softmax", wrong)


def padding_counted(subject: Subject) -> Any:
    """Padded keys of zeros take part in the softmax: each adds exp(0) to its sum."""

    def wrong(right: Run, a: dict[str, Any]) -> Tensor:
        return right(sink=torch.log(torch.exp(a["sink"]) + 24))

    return kernel("attention", wrong, in_layer(subject, 1, "sink", "sink"))


def window_kernel(subject: Subject) -> Any:
    return kernel("attention", lambda right, a: right(window=a["window"] - 1))


def window_argument(subject: Subject) -> Any:
    attention = subject.model.blocks[2].attention
    return patch.object(attention, "window", attention.window + 1)


def selection_ignored(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Tensor:
        seen = a["compressed"]
        return right(compressed=attention_op.Compressed(seen.pool, seen.table, seen.ratio, None))

    return kernel("attention", wrong, in_layer(subject, 1, "sink", "sink"))


def stale_page(subject: Subject) -> Any:
    """Window pages are given back 64 tokens too early; the next page overwrites them."""
    right, last_use = Geometry.oldest_column, Geometry.last_use

    def wrong(self: Geometry, length: int) -> int:
        return right(self, length) + (length > 127)

    def sooner(self: Geometry, column: int) -> int:
        return last_use(self, column) - 66

    return patch.multiple(Geometry, oldest_column=wrong, last_use=sooner)


def plain_base(subject: Subject) -> Any:
    c, attention = subject.config, subject.model.blocks[1].attention
    return patch.object(attention, "frequencies", rope_frequencies(c.rope_head_dim, c.rope_theta))


def yarn_in_window_layer(subject: Subject) -> Any:
    c, attention = subject.config, subject.model.blocks[0].attention
    wrong = yarn_frequencies(
        c.rope_head_dim, c.rope_theta, c.yarn_factor, c.yarn_original_len, 32, 1
    )
    return patch.object(attention, "frequencies", wrong)


def sink_of_another_layer(subject: Subject) -> Any:
    blocks = subject.model.blocks
    return patch.object(blocks[2].attention, "sink", blocks[1].attention.sink)


def no_latent_weight(subject: Subject) -> Any:
    when = in_layer(subject, 1, "weight", "q_norm")
    return kernel("rms_norm", lambda right, a: right(weight=None), when)


def groups_swapped(subject: Subject) -> Any:
    return kernel("grouped_linear", lambda right, a: right(x=a["x"].flip(1)))


# --- state ----------------------------------------------------------------------------------------


def rotary_in_fp8(subject: Subject) -> Any:
    """All channels of a key rounded to FP8, the rotary ones too."""

    def wrong(right: Run, a: dict[str, Any]) -> None:
        right()
        batch, pool = a["batch"], a["pool"]
        where = locate(a["table"], batch.seq_idx, batch.positions, pool.page_entries)
        keys = load(pool, *where)
        tail = keys[:, -16:]
        scale = torch.exp2(torch.ceil(torch.log2(tail.abs().amax(1, keepdim=True) / 448)))
        keys[:, -16:] = (tail / scale).to(torch.float8_e4m3fn).float() * scale
        store(pool, *where, keys)

    return kernel("kv_store", wrong)


def key_scale_dropped(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> None:
        right()
        a["pool"].parts["scale"].fill_(127)

    return kernel("kv_store", wrong)


def key_not_normalised(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> None:
        right(norm=torch.ones_like(a["norm"]))

    return kernel("kv_store", wrong, in_layer(subject, 2, "norm", "kv_norm"))


def ape_on_values(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> None:
        right(values=a["values"] + a["ape"][a["batch"].positions % a["ratio"]])

    return kernel("compress", wrong, in_layer(subject, 1, "ape", "compressor.ape"))


def swapped_halves(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> None:
        right(**{k: torch.cat(a[k].chunk(2, -1)[::-1], -1) for k in ("values", "gates", "ape")})

    return kernel("compress", wrong, in_layer(subject, 1, "ape", "compressor.ape"))


def rope_at_last_token(subject: Subject) -> Any:
    """In the reference itself: there is no kernel to blame."""

    def wrong(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
        return rope_reference(x, positions + 3, frequencies, inverse)

    return patch.object(compress_op, "rope_reference", wrong)


def index_keys_unturned(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> None:
        right(frequencies=torch.zeros_like(a["frequencies"]))

    return kernel("compress", wrong, in_layer(subject, 1, "ape", "indexer.compressor.ape"))


def tail_not_rotated(subject: Subject) -> Any:
    """While decoding, the compressor's newest token does not reach its memory."""

    def wrong(right: Run, a: dict[str, Any]) -> None:
        before = copied(a["state"])
        right()
        for name in ("values", "gates"):
            getattr(a["state"], name).copy_(getattr(before, name))

    when = in_layer(subject, 1, "ape", "compressor.ape")
    return kernel("compress", wrong, lambda a: when(a) and a["values"].shape[0] == 1)


def tail_forgotten(subject: Subject) -> Any:
    """What the last step left over is not read: blocks cut by a step lose their beginning."""

    def wrong(right: Run, a: dict[str, Any]) -> None:
        for name in ("values", "gates"):
            getattr(a["state"], name).zero_()
        right()

    return kernel("compress", wrong, in_layer(subject, 2, "ape", "compressor.ape"))


# --- indexer --------------------------------------------------------------------------------------


def index_query_position(subject: Subject) -> Any:
    return kernel("index_query", lambda right, a: right(positions=a["positions"] + 64))


def index_scale_dropped(subject: Subject) -> Any:
    return patch.object(subject.model.blocks[1].attention.indexer, "scale", 1.0)


def relu_missing(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Tensor:
        return (right() + right(q=-a["q"], weights=-a["weights"])).nan_to_num(nan=-torch.inf)

    return kernel("index_scores", wrong)


def ties_to_the_last(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Tensor:
        scores, width = a["scores"], a["scores"].shape[1]
        kept = width - 1 - right(scores=scores.flip(1))
        kept = kept.masked_fill(kept == width, width + 1).sort(1).values
        return kept.masked_fill(kept > width, -1)

    return kernel("index_select", wrong)


def one_selected_short(subject: Subject) -> Any:
    return kernel("index_select", lambda right, a: right(topk=a["topk"] - 1))


def topk_one_short(subject: Subject) -> Any:
    indexer = subject.model.blocks[1].attention.indexer
    return patch.object(indexer, "topk", indexer.topk - 1)


def topk_one_long(subject: Subject) -> Any:
    """Rows that ought to be scored are not."""
    indexer = subject.model.blocks[1].attention.indexer
    return patch.object(indexer, "topk", indexer.topk + 1)


# --- streams and experts --------------------------------------------------------------------------


def comb_transposed(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Any:
        return right(comb=a["comb"].transpose(1, 2).contiguous())

    return kernel("mhc_boundary", wrong)


def post_not_doubled(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Any:
        streams, x, post, comb = right()
        return streams, x, post / 2, comb

    site = subject.model.blocks[2].ffn_site
    return kernel("mhc_boundary", wrong, lambda a: a["site"] is site)


def one_sinkhorn_round(subject: Subject) -> Any:
    block = subject.model.blocks[1]
    return patch.object(block, "ffn_site", replace(block.ffn_site, sinkhorn_iters=3))


def weight_twice(subject: Subject) -> Any:
    return kernel("experts", lambda right, a: right(weights=a["weights"].square()))


def shared_unclamped(subject: Subject) -> Any:
    right = experts_op.expert_reference

    def wrong(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor | None, limit: float) -> Tensor:
        return right(x, w13, w2, weight, float("inf") if weight is None else limit)

    return patch.object(experts_op, "expert_reference", wrong)


def bias_in_weights(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Any:
        chosen, weights = right()
        weights = weights + a["bias"][chosen]
        return chosen, weights / weights.sum(1, keepdim=True) * a["scaling"]

    return kernel("router", wrong, lambda a: a["bias"] is not None)


def table_ignored(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Any:
        return right(table=None, bias=torch.zeros(a["gate"].shape[0]))

    return kernel("router", wrong, lambda a: a["table"] is not None)


def scaling_dropped(subject: Subject) -> Any:
    ffn = subject.model.blocks[2].ffn
    return patch.object(ffn, "gate", replace(ffn.gate, scaling=1.0))


def large_values(subject: Subject) -> Any:
    """A kernel that saturates: right below 500, wrong above."""
    return kernel("linear", lambda right, a: right(x=a["x"].clamp(-500, 500)))


def head_row_shifted(subject: Subject) -> Any:
    def wrong(right: Run, a: dict[str, Any]) -> Any:
        return right(y=a["y"].roll(1, 0)) if a["y"].shape[0] > 1 else right()

    return kernel("mhc_head", wrong)


@contextmanager
def unscaled_layer(subject: Subject) -> Iterator[None]:
    """A matrix that lost its scale on the way into the engine."""
    attention = subject.model.blocks[2].attention
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "wo_b", attention.wo_b.map(lambda w: w * 16)))
        yield


FP8 = {"kv_format": "fp8"}
FAULTS = (
    Fault("query rope one position off", query_position, 2, "query_prepare", "kernel"),
    Fault("inverse rope skipped", no_inverse_rope, 2, "attention", "kernel"),
    Fault("sink ignored", sink_ignored, 0, "attention", "kernel"),
    Fault("padded length counted", padding_counted, 1, "attention", "kernel"),
    Fault("window one key short", window_kernel, 0, "attention", "kernel"),
    Fault("window one key long", window_argument, 2, "attention", "argument", "window is 33"),
    Fault("selection ignored", selection_ignored, 1, "attention", "kernel"),
    Fault("stale page", stale_page, 0, "attention", "state", "no longer", {"sliding_window": 130}),
    Fault("plain base in a compressed layer", plain_base, 1, "window_key", "argument", "freq"),
    Fault("YaRN in a window layer", yarn_in_window_layer, 0, "window_key", "argument", "freq"),
    Fault("sink of another layer", sink_of_another_layer, 2, "attention", "weight", "from layer 1"),
    Fault("query latent without its weight", no_latent_weight, 1, "latent_norm", "kernel"),
    Fault("output groups swapped", groups_swapped, 0, "output_groups", "kernel"),
    Fault("rotary channels in FP8", rotary_in_fp8, 0, "window_key", "kernel", choices=FP8),
    Fault("key scale dropped", key_scale_dropped, 0, "window_key", "kernel", choices=FP8),
    Fault("key norm without its weight", key_not_normalised, 2, "window_key", "kernel"),
    Fault("ape added to values", ape_on_values, 1, "entries", "kernel"),
    Fault("compressor halves swapped", swapped_halves, 1, "entries", "kernel"),
    Fault("entry rope at the last token", rope_at_last_token, 1, "entries", "reference"),
    Fault("index keys not rotated", index_keys_unturned, 1, "index_keys", "kernel"),
    Fault("tail state not rotated", tail_not_rotated, 1, "entries", "kernel"),
    Fault("tail state forgotten", tail_forgotten, 2, "entries", "kernel"),
    Fault("index query 64 positions off", index_query_position, 1, "index_query", "kernel"),
    Fault("index scale dropped", index_scale_dropped, 1, "index_scores", "argument", "weights"),
    Fault("ReLU missing", relu_missing, 1, "index_scores", "kernel"),
    Fault("ties to the higher index", ties_to_the_last, 1, "index_select", "kernel",
        changes={"index_num_heads": 1}),
    Fault("one selected too few", one_selected_short, 1, "index_select", "kernel"),
    Fault("topk one short", topk_one_short, 1, "index_select", "argument", "topk is 7"),
    Fault("topk one long", topk_one_long, 1, "index_scores", "argument", "topk is 9"),
    Fault("sink left out of the definition", sink_left_out, 2, "attention", "reference"),
    Fault("mixing matrix transposed", comb_transposed, 0, "mix_ffn", "kernel"),
    Fault("post not doubled", post_not_doubled, 2, "mix_ffn", "kernel"),
    Fault("one Sinkhorn round short", one_sinkhorn_round, 1, "mix_ffn", "argument", "sinkhorn"),
    Fault("expert weight applied twice", weight_twice, 0, "experts", "kernel"),
    Fault("shared expert unclamped", shared_unclamped, 0, "experts", "reference"),
    Fault("bias in the expert weights", bias_in_weights, 1, "router", "kernel"),
    Fault("hash table ignored", table_ignored, 0, "router", "kernel"),
    Fault("routed scaling dropped", scaling_dropped, 2, "router", "argument", "scaling is 1.0"),
    Fault("wrong above 500", large_values, 0, "project", "kernel", nasty=True),
    Fault("head reads another token's row", head_row_shifted, 2, "head_mix", "kernel"),
    Fault("output matrix unscaled", unscaled_layer, 2, "output", "weight", "not what the file"),
)  # fmt: skip
