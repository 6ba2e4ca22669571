"""The oracle test can see mistakes: each known wrong variant, injected alone, moves the logits.

The variants are those other implementations had, and a few of our own. Every one must move the
logits at least a hundred times further than the tolerance of `test_model.py`.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dsv4.ops.attention.attention as attention_op
import dsv4.ops.attention.index as index_op
import dsv4.ops.attention.query as query_op
import dsv4.ops.fused.block as block_module
import dsv4.ops.kv.compress as compress_op
import dsv4.ops.mhc.mix as mix_op
import dsv4.ops.moe.experts as experts_op
import dsv4.ops.moe.router as router_op
from dsv4.ops.kv.rope import rope_frequencies, rope_reference, yarn_frequencies
from dsv4.runner.runner import Runner
from dsv4.testing import random_weights, small_config
from tests.oracle.harness import exact_runner, run_schedule
from tests.oracle.reference import Reference

CONFIG = small_config(index_num_heads=16)
LENGTH = 389
VISIBLE = 0.02  # a hundred times the tolerance


@pytest.fixture(scope="module")
def reference() -> Reference:
    ids = random.Random(5).choices(range(CONFIG.vocab_size), k=LENGTH)
    return Reference(CONFIG, random_weights(CONFIG, 11), [ids])


def _wrong_compress(change: Callable[..., dict[str, object]]) -> object:
    """Replace the compressor's op by one with changed arguments."""
    right = compress_op.compress

    def wrong(block: compress_op.Compression) -> None:
        right(replace(block, **change(vars(block))))  # type: ignore[arg-type]

    return patch.object(block_module, "compress", wrong)


def bias_on_values(runner: Runner) -> object:
    return _wrong_compress(
        lambda a: {"values": a["values"] + a["ape"][a["batch"].positions % a["ratio"]]}
    )


def swapped_halves(runner: Runner) -> object:
    def swap(a: dict[str, Tensor]) -> dict[str, Tensor]:
        if a["ratio"] != 4:
            return {}
        return {k: torch.cat(a[k].chunk(2, -1)[::-1], -1) for k in ("values", "gates", "ape")}

    return _wrong_compress(swap)


@contextmanager
def _wrong_rope_of_entries(turn: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Iterator[None]:
    ratio = 0

    def remember(a: dict[str, int]) -> dict[str, object]:
        nonlocal ratio
        ratio = a["ratio"]
        return {}

    def wrong(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
        return turn(x, positions, frequencies, ratio)

    with _wrong_compress(remember), patch.object(compress_op, "rope_reference", wrong):
        yield


def rope_at_last_token(runner: Runner) -> object:
    return _wrong_rope_of_entries(lambda x, p, f, ratio: rope_reference(x, p + ratio - 1, f, False))


def no_rope_on_index_keys(runner: Runner) -> object:
    def turn(x: Tensor, p: Tensor, f: Tensor, ratio: int) -> Tensor:
        return x if x.shape[-1] == CONFIG.index_head_dim else rope_reference(x, p, f, False)

    return _wrong_rope_of_entries(turn)


def transposed_mixing(runner: Runner) -> object:
    right = mix_op.mhc_update_reference

    def wrong(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return right(streams, y, post, comb.transpose(1, 2))

    return patch.object(mix_op, "mhc_update_reference", wrong)


def _frequencies(runner: Runner, compressed: bool, wrong: Tensor) -> ExitStack:
    """Other frequencies for queries, window keys and the rotation back; not for compressors."""
    stack = ExitStack()
    for block in runner.model.blocks:
        if (block.attention.ratio > 0) == compressed:
            stack.enter_context(patch.object(block.attention, "frequencies", wrong))
    return stack


def plain_base_in_compressed_layers(runner: Runner) -> object:
    return _frequencies(runner, True, rope_frequencies(CONFIG.rope_head_dim, CONFIG.rope_theta))


def yarn_in_window_layers(runner: Runner) -> object:
    c = CONFIG
    wrong = yarn_frequencies(
        c.rope_head_dim, c.rope_theta, c.yarn_factor, c.yarn_original_len, 32, 1
    )
    return _frequencies(runner, False, wrong)


def shared_expert_unclamped(runner: Runner) -> object:
    right = experts_op.expert_reference

    def wrong(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor | None, limit: float) -> Tensor:
        return right(x, w13, w2, weight, float("inf") if weight is None else limit)

    return patch.object(experts_op, "expert_reference", wrong)


def window_one_too_long(runner: Runner) -> object:
    stack = ExitStack()
    for block in runner.model.blocks:
        stack.enter_context(patch.object(block.attention, "window", CONFIG.sliding_window + 1))
    return stack


def no_inverse_rope(runner: Runner) -> object:
    return patch.object(attention_op, "rope_reference", lambda x, p, f, inverse: x)


def no_query_norm(runner: Runner) -> object:
    return patch.object(query_op, "rms_norm_reference", lambda x, weight, eps: x)


def index_queries_64_positions_off(runner: Runner) -> object:
    right = query_op.INDEX.reference

    def wrong(q: Tensor, positions: Tensor, frequencies: Tensor, index_format: str) -> Tensor:
        return right(q, positions + 64, frequencies, index_format)

    return _replace_reference(query_op.INDEX, wrong)


def _wrong_choice(change: Callable[[Tensor, int], Tensor]) -> object:
    right = index_op.SELECT.reference

    def wrong(scores: Tensor, topk: int) -> Tensor:
        return right(change(scores, topk), topk)

    return _replace_reference(index_op.SELECT, wrong)


def one_entry_too_few(runner: Runner) -> object:
    def change(scores: Tensor, topk: int) -> Tensor:
        last = scores.argsort(1, descending=True)[:, topk - 1 : topk]
        return scores.scatter(1, last, float("-inf"))

    return _wrong_choice(change)


def entry_beyond_the_border(runner: Runner) -> object:
    """The best that should be left out takes the place of the worst that should be kept."""

    def change(scores: Tensor, topk: int) -> Tensor:
        border = scores.argsort(1, descending=True)[:, topk - 1 : topk + 1]
        swapped = scores.gather(1, border).flip(1)
        return scores.scatter(1, border, swapped)

    return _wrong_choice(change)


def routing_without_bias(runner: Runner) -> object:
    right = router_op.OP.reference

    def wrong(**given: Any) -> object:
        bias = None if given["bias"] is None else torch.zeros_like(given["bias"])
        return right(**{**given, "bias": bias})

    return _replace_reference(router_op.OP, wrong)


@contextmanager
def _replace_reference(op: object, wrong: object) -> Iterator[None]:
    right = op.reference  # type: ignore[attr-defined]
    object.__setattr__(op, "reference", wrong)
    try:
        yield
    finally:
        object.__setattr__(op, "reference", right)


VARIANTS = (
    bias_on_values,
    rope_at_last_token,
    no_rope_on_index_keys,
    transposed_mixing,
    swapped_halves,
    plain_base_in_compressed_layers,
    yarn_in_window_layers,
    shared_expert_unclamped,
    window_one_too_long,
    no_inverse_rope,
    no_query_norm,
    index_queries_64_positions_off,
    one_entry_too_few,
    entry_beyond_the_border,
    routing_without_bias,
)


def distance(reference: Reference, variant: Callable[[Runner], Any] | None) -> float:
    [ids] = reference.sequences
    runner = exact_runner(CONFIG, reference.weights)
    with variant(runner) if variant else nullcontext():
        ours = run_schedule(runner, [ids], [[(0, len(ids))]], reference.ties.step)[0]
    return float((ours - reference.logits[0]).abs().max())


def test_the_right_model_passes(reference: Reference) -> None:
    assert distance(reference, None) < 2e-4


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_wrong_variant_is_seen(variant: Callable[[Runner], Any], reference: Reference) -> None:
    assert distance(reference, variant) > VISIBLE
