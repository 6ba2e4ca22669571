"""The tie detector: rounding never fails a comparison, and nothing but rounding is excused."""

import random

import pytest
import torch
from torch import Tensor

from dsv4.testing import random_weights, small_config
from tests.oracle.harness import exact_runner, run_schedule
from tests.oracle.reference import Reference
from tests.oracle.ties import as_mask, nudged, settle

CONFIG = small_config(index_num_heads=16, num_layers=4, compress_ratios=(4, 128, 0, 4))
LENGTH = 150


@pytest.mark.parametrize(
    ("theirs", "margin", "followed"),
    [
        ([0, 2], 0.02, True),  # the third instead of the second: 0.01 below the border
        ([0, 2], 0.005, False),
        ([1, 2], 0.02, False),  # and without the best
        ([0], 0.02, False),  # one too few
        ([0, 1, 2], 0.02, False),  # one too many
        ([0, 3], 0.02, False),  # one that nobody may see
        ([0, 1], 0.02, False),  # the same choice is no tie
    ],
)
def test_only_a_border_closer_than_the_margin_is_a_tie(
    theirs: list[int], margin: float, followed: bool
) -> None:
    scores = torch.tensor([[0.9, 0.5, 0.49, float("-inf")]])
    ours, other = as_mask(torch.tensor([[0, 1]]), 4), as_mask(torch.tensor([theirs]), 4)
    taken, tied = settle(scores, ours, other, torch.tensor([margin]))
    assert tied.item() is followed
    assert torch.equal(taken, other if followed else ours)


def twin_experts(weights: dict[str, Tensor]) -> None:
    """Experts 0 and 1 always score the same, but compute something else."""
    for name, weight in weights.items():
        if name.endswith(("ffn.gate.weight", "ffn.gate.bias")):
            weight[1] = weight[0]


def equal_entries(weights: dict[str, Tensor]) -> None:
    """Every entry of an index scores 0."""
    for name, weight in weights.items():
        if name.endswith("indexer.weights_proj.weight"):
            weight.zero_()


@pytest.mark.parametrize("make_ties", [twin_experts, equal_entries])
def test_ties_are_decided_as_the_other_side_decides(make_ties: object) -> None:
    """Other roundings of the same model; without the detector they would be far off."""
    weights = random_weights(CONFIG, 21)
    make_ties(weights)  # type: ignore[operator]
    ids = random.Random(1).choices(range(CONFIG.vocab_size), k=LENGTH)
    reference = Reference(CONFIG, weights, [ids])
    furthest = 0.0
    for used in (weights, *(nudged(weights, seed) for seed in range(101, 104))):
        runner = exact_runner(CONFIG, used)
        watched = run_schedule(runner, [ids], [[(0, LENGTH)]], reference.ties.step)[0]
        assert float((watched - reference.logits[0]).abs().max()) < 2e-4
        plain = run_schedule(runner, [ids], [[(0, LENGTH)]])[0]
        furthest = max(furthest, float((plain - reference.logits[0]).abs().max()))
    assert reference.ties.num_followed > 10
    assert furthest > 0.02
