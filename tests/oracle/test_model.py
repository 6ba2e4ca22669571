"""Promise 1: in exact mode the logits are transformers', however the tokens are fed."""

import itertools
import os
import random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.runner.runner import Runner
from dsv4.testing import random_weights, small_config
from tests.oracle.harness import (
    Schedule,
    exact_runner,
    random_schedule,
    run_schedule,
    whole,
)
from tests.oracle.reference import Reference

TOLERANCE = 2e-4
SHARDS = 4  # each draws its own configs, so that they can run side by side
CONFIGS_PER_SHARD = int(os.environ.get("DSV4_ORACLE_CONFIGS", "24")) // SHARDS


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small models of any shape with at least one layer of each compressed kind."""
    num_layers = draw(st.integers(3, 4))
    ratios = draw(st.permutations([4, 128, *draw(st.lists(st.sampled_from((0, 4, 128)),
        min_size=num_layers - 2, max_size=num_layers - 2))]))  # fmt: skip
    heads, groups = draw(st.sampled_from(((4, 2), (6, 3), (8, 4), (5, 1))))
    head_dim, rope_dim, index_dim = draw(
        st.sampled_from(((32, 16, 32), (24, 8, 16), (48, 16, 16), (16, 16, 16), (40, 2, 32)))
    )
    experts = draw(st.integers(4, 9))
    return small_config(
        vocab_size=draw(st.integers(50, 130)),
        hidden_size=draw(st.sampled_from((32, 52, 64))),
        num_layers=num_layers,
        num_hash_layers=draw(st.integers(0, num_layers)),
        compress_ratios=tuple(ratios),
        num_heads=heads,
        o_groups=groups,
        o_lora_rank=draw(st.sampled_from((8, 13))),
        head_dim=head_dim,
        rope_head_dim=rope_dim,
        q_lora_rank=draw(st.sampled_from((16, 24, 31))),
        sliding_window=draw(st.sampled_from((5, 16, 33, 128))),
        index_num_heads=draw(st.sampled_from((16, 24))),
        index_head_dim=index_dim,
        index_topk=draw(st.sampled_from((4, 8, 20, 64))),
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, min(4, experts))),
        moe_intermediate_size=draw(st.sampled_from((16, 32, 37))),
        routed_scaling_factor=draw(st.sampled_from((1.0, 1.5, 2.5))),
        swiglu_limit=draw(st.sampled_from((0.5, 10.0))),
        hc_mult=draw(st.sampled_from((2, 4))),
        hc_sinkhorn_iters=draw(st.sampled_from((1, 5, 20))),
        yarn_factor=draw(st.sampled_from((1.0, 4.0, 16.0))),
        rms_norm_eps=draw(st.sampled_from((1e-6, 1e-5))),
    )


def token_by_token(length: int, prefix: int) -> Schedule:
    return [*whole(prefix), *([[(0, 1)]] * (length - prefix))]


def compare(reference: Reference, runner: Runner, schedule: Schedule) -> None:
    """The schedule may leave out the last sequences, and the ends of the others."""
    lengths = [0] * len(reference.sequences)
    for index, count in itertools.chain(*schedule):
        lengths[index] += count
    fed = [ids[:n] for ids, n in zip(reference.sequences, lengths, strict=True) if n]
    found = run_schedule(runner, fed, schedule, reference.ties.step)
    for ours, theirs in zip(found, reference.logits, strict=False):
        difference = (ours - theirs[: len(ours)]).abs().max()
        assert difference < TOLERANCE, f"logits differ by {difference:.2e}"


def check_config(config: ModelConfig, rng: random.Random) -> None:
    """All ways of feeding tokens."""
    weights = random_weights(config, rng.getrandbits(32))
    runner = exact_runner(config, weights)
    lengths = [rng.randint(401, 430), *(rng.randint(1, 160) for _ in range(rng.randint(0, 4)))]
    sequences = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    assert lengths[0] // 128 >= 2
    assert lengths[0] // 4 > config.index_topk
    reference = Reference(config, weights, sequences)
    prefix = rng.choice((120, 250, 380))
    compare(reference, runner, whole(lengths[0]))
    compare(reference, runner, token_by_token(prefix + 15, prefix))
    compare(reference, runner, random_schedule(rng, lengths))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_equals_transformers(shard: int) -> None:
    @seed(shard)
    @settings(
        max_examples=CONFIGS_PER_SHARD,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(), st.integers(0, 2**32))
    def check(config: ModelConfig, drawn: int) -> None:
        check_config(config, random.Random(drawn))

    check()


def test_every_token_alone() -> None:
    """From the first token past two blocks of 128, one token a step."""
    config = small_config(index_num_heads=16, num_layers=3, compress_ratios=(0, 4, 128))
    weights = random_weights(config, 7)
    ids = random.Random(1).choices(range(config.vocab_size), k=270)
    reference = Reference(config, weights, [ids])
    compare(reference, exact_runner(config, weights), token_by_token(len(ids), 0))


def test_nasty_weights() -> None:
    """Activations in the hundreds, clamps that act, index scores that nearly tie.

    Some tokens magnify rounding a thousandfold, so theirs is measured.
    """
    config = small_config(index_num_heads=16, compress_ratios=(0, 128, 4, 128, 4, 0, 128))
    weights = random_weights(config, 3, nasty=True)
    ids = random.Random(2).choices(range(config.vocab_size), k=300)
    reference = Reference(config, weights, [ids])
    ties, expected = reference.ties, reference.logits[0]
    ours = run_schedule(exact_runner(config, weights), [ids], [[(0, len(ids))]], ties.step)[0]
    allowed = ties.rounding(0).logits.clamp(min=TOLERANCE * float(expected.std()))
    difference = (ours - expected).abs().amax(1)
    assert (difference < allowed).all(), f"{(difference / allowed).max():.1f} times the rounding"
    assert allowed.median() < 0.01 * expected.std()  # or nothing would be compared
