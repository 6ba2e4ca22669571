"""The oracle test can see mistakes: each known wrong variant, injected alone, moves the logits.

The variants are those other implementations had (`dsv4/tools/quality/variants.py`), and a few of
our own. Every one must move the
logits at least a hundred times further than the tolerance of `test_model.py`.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dsv4.ops.attention.attention as attention_op
import dsv4.ops.attention.index as index_op
import dsv4.ops.attention.query as query_op
import dsv4.ops.moe.router as router_op
from dsv4.runner.runner import Runner
from dsv4.testing import random_weights, small_config
from dsv4.tools.quality.variants import MISTAKES
from tests.oracle.harness import exact_runner, run_schedule
from tests.oracle.reference import Reference

CONFIG = small_config(index_num_heads=16)
LENGTH = 389
VISIBLE = 0.02  # a hundred times the tolerance


@pytest.fixture(scope="module")
def reference() -> Reference:
    ids = random.Random(5).choices(range(CONFIG.vocab_size), k=LENGTH)
    return Reference(CONFIG, random_weights(CONFIG, 11), [ids])


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

    def wrong(x: Tensor, token_ids: Tensor, by: router_op.Gate) -> object:
        bias = None if by.bias is None else torch.zeros_like(by.bias)
        return right(x, token_ids, replace(by, bias=bias))

    return _replace_reference(router_op.OP, wrong)


@contextmanager
def _replace_reference(op: object, wrong: object) -> Iterator[None]:
    right, faster = op.reference, op.cpu_function  # type: ignore[attr-defined]
    object.__setattr__(op, "reference", wrong)
    object.__setattr__(op, "cpu_function", None)
    try:
        yield
    finally:
        object.__setattr__(op, "reference", right)
        object.__setattr__(op, "cpu_function", faster)


def known(name: str) -> Callable[[Runner], Any]:
    """A mistake that other implementations had, as `bench quality` makes it."""
    return lambda runner: MISTAKES[name](runner.model)


VARIANTS = {name: known(name) for name in MISTAKES} | {
    variant.__name__: variant
    for variant in (
        no_inverse_rope,
        no_query_norm,
        index_queries_64_positions_off,
        one_entry_too_few,
        entry_beyond_the_border,
        routing_without_bias,
    )
}


def distance(reference: Reference, variant: Callable[[Runner], Any] | None) -> float:
    [ids] = reference.sequences
    runner = exact_runner(CONFIG, reference.weights)
    with variant(runner) if variant else nullcontext():
        ours = run_schedule(runner, [ids], [[(0, len(ids))]], reference.ties.step)[0]
    return float((ours - reference.logits[0]).abs().max())


def test_the_right_model_passes(reference: Reference) -> None:
    assert distance(reference, None) < 2e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_wrong_variant_is_seen(name: str, reference: Reference) -> None:
    assert distance(reference, VARIANTS[name]) > VISIBLE
