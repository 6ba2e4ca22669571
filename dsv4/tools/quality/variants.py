"""Deliberately broken parts of the model, for the duration of a `with` block. References only.

Two disable a mechanism (the indexer's selection, compressed attention); the others are mistakes
that implementations of DeepSeek-V4 really had. A trained model must answer worse under each.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dsv4.model.attention as attention_module
import dsv4.model.indexer as indexer_module
import dsv4.ops.fused.block as block_module
import dsv4.ops.kv.compress as compress_module
import dsv4.ops.mhc.mix as mix_module
import dsv4.ops.moe.experts as experts_module
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.model.attention import layer_frequencies
from dsv4.model.transformer import Transformer
from dsv4.ops.attention.attention import Visible
from dsv4.ops.attention.index import index_select
from dsv4.ops.attention.query import Queries
from dsv4.ops.fused.block import query_attention
from dsv4.ops.kv.compress import Compression, compress
from dsv4.ops.kv.rope import rope_frequencies, rope_reference
from dsv4.ops.mhc.mix import Update, mhc_update_reference
from dsv4.ops.moe.experts import expert_reference

Broken = AbstractContextManager[Any]


def random_selection(model: Transformer) -> Broken:
    """Replace the indexer's selection by random visible entries."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(scores: Tensor, topk: int) -> Tensor:
        noise = torch.rand(scores.shape, generator=generator).to(scores.device)
        return index_select(torch.where(torch.isfinite(scores), noise, scores), topk)

    return patch.object(indexer_module, "index_select", shuffled)


def no_compressed_attention(model: Transformer) -> Broken:
    """Every layer attends only to its window."""

    def blind(queries: Queries, to: Visible) -> Tensor:
        return query_attention(queries, replace(to, compressed=None))

    return patch.object(attention_module, "query_attention", blind)


def _compress_with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Broken:
    def wrong(block: Compression) -> None:
        compress(replace(block, **change(vars(block))))

    return patch.object(block_module, "compress", wrong)


def bias_on_values(model: Transformer) -> Broken:
    return _compress_with(
        lambda a: {"values": a["values"] + a["ape"][a["batch"].positions % a["ratio"]]}
    )


def swapped_halves(model: Transformer) -> Broken:
    def swap(a: dict[str, Any]) -> dict[str, Any]:
        if a["ratio"] != 4:
            return {}
        return {key: torch.cat(a[key].chunk(2, -1)[::-1], -1) for key in ("values", "gates", "ape")}

    return _compress_with(swap)


@contextmanager
def _entries_turned(turn: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Iterator[None]:
    ratio = 0

    def remember(a: dict[str, Any]) -> dict[str, Any]:
        nonlocal ratio
        ratio = a["ratio"]
        return {}

    def wrong(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
        return turn(x, positions, frequencies, ratio)

    with _compress_with(remember), patch.object(compress_module, "rope_reference", wrong):
        yield


def rope_at_last_token(model: Transformer) -> Broken:
    return _entries_turned(lambda x, p, f, ratio: rope_reference(x, p + ratio - 1, f, False))


def no_rope_on_index_keys(model: Transformer) -> Broken:
    width = model.config.index_head_dim

    def turn(x: Tensor, p: Tensor, f: Tensor, ratio: int) -> Tensor:
        return x if x.shape[-1] == width else rope_reference(x, p, f, False)

    return _entries_turned(turn)


def transposed_mixing(model: Transformer) -> Broken:
    def wrong(streams: Tensor, update: Update) -> Tensor:
        return mhc_update_reference(streams, replace(update, comb=update.comb.transpose(1, 2)))

    return patch.object(mix_module, "mhc_update_reference", wrong)


def shared_expert_unclamped(model: Transformer) -> Broken:
    def wrong(x: Tensor, w13: Any, w2: Any, weight: Tensor | None, limit: float) -> Tensor:
        return expert_reference(x, w13, w2, weight, float("inf") if weight is None else limit)

    return patch.object(experts_module, "expert_reference", wrong)


def _in_attention(model: Transformer, name: str, value: Any, *, compressed: bool | None) -> Broken:
    """Set an attribute of the attention of some layers (all, or those with or without entries)."""
    stack = ExitStack()
    for block in model.blocks:
        if compressed is None or (block.attention.ratio > 0) == compressed:
            stack.enter_context(patch.object(block.attention, name, value))
    return stack


def plain_base_in_compressed_layers(model: Transformer) -> Broken:
    """Applies to queries, window keys and the inverse rotation; compressors keep theirs."""
    c = model.config
    wrong = rope_frequencies(c.rope_head_dim, c.rope_theta)
    return _in_attention(model, "frequencies", wrong, compressed=True)


def yarn_in_window_layers(model: Transformer) -> Broken:
    c = model.config
    wrong = layer_frequencies(replace(c, compress_rope_theta=c.rope_theta), 4)
    return _in_attention(model, "frequencies", wrong, compressed=False)


def window_one_too_long(model: Transformer) -> Broken:
    longer = model.config.sliding_window + 1
    return _in_attention(model, "window", longer, compressed=None)


SWITCHED_OFF: dict[str, Callable[[Transformer], Broken]] = {
    "random-selection": random_selection,
    "no-compressed-attention": no_compressed_attention,
}
MISTAKES: dict[str, Callable[[Transformer], Broken]] = {
    "bias-on-values": bias_on_values,
    "rope-at-last-token": rope_at_last_token,
    "no-rope-on-index-keys": no_rope_on_index_keys,
    "transposed-mixing": transposed_mixing,
    "swapped-halves": swapped_halves,
    "plain-base-in-compressed-layers": plain_base_in_compressed_layers,
    "yarn-in-window-layers": yarn_in_window_layers,
    "shared-expert-unclamped": shared_expert_unclamped,
    "window-one-too-long": window_one_too_long,
}
VARIANTS = SWITCHED_OFF | MISTAKES


def broken(engine: Engine, name: str) -> Broken:
    """Apply the named variant for a `with` block; an empty name changes nothing.

    Use a fresh engine: its cache could otherwise hold prefixes computed by the correct model.
    """
    if not name:
        return nullcontext()
    if name not in VARIANTS:
        raise OptionError(f"variant is {name!r}, expected one of {', '.join(VARIANTS)}")
    runner, stack = engine._runner, ExitStack()
    references = replace(runner.ops, forced=None)  # faster variants do not call what is replaced
    stack.enter_context(patch.object(runner, "ops", references))
    stack.enter_context(VARIANTS[name](runner.model))
    return stack
