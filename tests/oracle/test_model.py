"""Promise 1: in exact mode the logits are transformers', however the tokens are fed."""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.testing import random_weights, small_config
from tests.oracle.harness import (
    Schedule,
    exact_runner,
    random_schedule,
    run_schedule,
    tied_positions,
    whole,
)
from tests.oracle.reference import transformers_model

TOLERANCE = 2e-4
SHARDS = 4  # each draws its own configs, so that they can run side by side
CONFIGS_PER_SHARD = int(os.environ.get("DSV4_ORACLE_CONFIGS", "32")) // SHARDS


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


def compare(ours: torch.Tensor, theirs: torch.Tensor, first_tie: int) -> None:
    difference = (ours - theirs)[:first_tie].abs().max()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e}"


def check_config(config: ModelConfig, rng: random.Random) -> bool:
    """All ways of feeding tokens; whether the whole length could be compared (no tie)."""
    weights = random_weights(config, rng.getrandbits(32))
    oracle = transformers_model(config, weights)
    runner = exact_runner(config, weights)
    lengths = [rng.randint(401, 430), *(rng.randint(1, 160) for _ in range(rng.randint(0, 4)))]
    sequences = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    assert lengths[0] // 128 >= 2
    assert lengths[0] // 4 > config.index_topk
    with torch.inference_mode():
        expected = [oracle(torch.tensor([ids])).logits[0] for ids in sequences]
    borders = []
    for ids in sequences:  # alone and in one step, so that rows are positions
        with tied_positions() as tied:
            run_schedule(runner, [ids], [[(0, len(ids))]])
        borders.append(min(tied, default=len(ids)))
    long, first_tie = sequences[0], borders[0]
    prefix = rng.choice((120, 250, 380))
    for schedule in (whole(len(long)), token_by_token(prefix + 15, prefix)):
        ids = long[: sum(count for step in schedule for _, count in step)]
        compare(run_schedule(runner, [ids], schedule)[0], expected[0][: len(ids)], first_tie)
    results = run_schedule(runner, sequences, random_schedule(rng, lengths))
    for ours, theirs, border in zip(results, expected, borders, strict=True):
        compare(ours, theirs, border)
    return first_tie == len(long)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_equals_transformers(shard: int) -> None:
    untied = []

    @seed(shard)
    @settings(
        max_examples=CONFIGS_PER_SHARD,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(), st.integers(0, 2**32))
    def check(config: ModelConfig, drawn: int) -> None:
        untied.append(check_config(config, random.Random(drawn)))

    check()
    assert len(untied) >= CONFIGS_PER_SHARD
    # ties shorten a comparison; they must stay the exception for the test to mean something
    assert sum(untied) >= len(untied) // 2, f"{len(untied) - sum(untied)} of {len(untied)} tied"


def test_every_token_alone() -> None:
    """From the first token past two blocks of 128, one token a step."""
    config = small_config(index_num_heads=16, num_layers=4, compress_ratios=(0, 4, 128, 4))
    weights = random_weights(config, 7)
    ids = [random.Random(1).randrange(config.vocab_size) for _ in range(270)]
    with torch.inference_mode():
        expected = transformers_model(config, weights)(torch.tensor([ids])).logits[0]
    ours = run_schedule(exact_runner(config, weights), [ids], token_by_token(len(ids), 0))[0]
    compare(ours, expected, len(ids))


def test_nasty_weights() -> None:
    """Activations in the hundreds, clamps that act, index scores that tie: equal up to the tie.

    Rounding is relative to the largest activations here, so the tolerance is ten times wider.
    """
    config = small_config(index_num_heads=16, compress_ratios=(0, 128, 4, 128, 4, 0, 128))
    weights = random_weights(config, 3, nasty=True)
    ids = [random.Random(2).randrange(config.vocab_size) for _ in range(300)]
    with torch.inference_mode():
        expected = transformers_model(config, weights)(torch.tensor([ids])).logits[0]
    with tied_positions(1e-3) as tied:
        runner = exact_runner(config, weights)
        ours = run_schedule(runner, [ids], [[(0, len(ids))]])[0]
    border = min(tied)
    assert border >= 4 * config.index_topk  # up to there every entry is taken without a choice
    scale = 10 * expected.std()
    compare(ours / scale, expected / scale, border)
