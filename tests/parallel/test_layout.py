"""Who holds what: every part of a model exactly once, and refusals that say what would do."""

import itertools
import random
from dataclasses import replace

import pytest

from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.parallel.layout import RankLayout, balance, k_ranges
from dsv4.testing import small_config

MODELS = {
    "flash": ModelConfig.builtin("flash"),
    "pro": ModelConfig.builtin("pro"),
    "small": small_config(),
}


def layouts(config: ModelConfig, tp: int, pp: int) -> list[RankLayout]:
    stages = balance([1] * config.num_layers, pp)
    return [RankLayout(tp, pp, rank, stages) for rank in range(tp * pp)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_ranks_together_hold_everything_once(name: str, pp: int) -> None:
    config = MODELS[name]
    for tp in (1, 2, 4, 8):
        if k_ranges(config) % tp:
            continue
        ranks = layouts(config, tp, pp)
        for layout in ranks:
            layout.check(config)
        for stage in range(pp):
            group = [layout for layout in ranks if layout.stage == stage]
            assert [r for layout in group for r in [layout.rank]] == list(group[0].group)
            for part, count in (
                ("heads", config.num_heads),
                ("groups", config.o_groups),
                ("experts", config.num_experts),
                ("vocab", config.vocab_size),
            ):
                held = [i for layout in group for i in getattr(layout, part)(config)]
                assert held == list(range(count)), part
            for num_rows in (0, 1, 5, 8, 33):
                owned = [row for layout in group for row in layout.rows(num_rows)]
                assert owned == list(range(num_rows))
        layers = [layer for layout in ranks[::tp] for layer in layout.layers(config)]
        assert layers == list(range(config.num_layers))
        assert [layout.is_first for layout in ranks] == [True] * tp + [False] * (tp * (pp - 1))
        assert sum(layout.is_last for layout in ranks) == tp


def test_heads_are_those_of_the_groups() -> None:
    config = MODELS["pro"]  # 8 heads in a group
    layout = RankLayout(8, 1, 3)
    assert layout.groups(config) == range(6, 8)
    assert layout.heads(config) == range(48, 64)


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_as_even_as_they_can_be(seed: int) -> None:
    """Against every way to cut."""
    rng = random.Random(seed)
    costs = [rng.randint(1, 9) for _ in range(rng.randint(3, 8))]
    first, last, pp = rng.randint(0, 9), rng.randint(0, 9), rng.randint(1, 3)

    def dearest(ends: tuple[int, ...]) -> int:
        bounds = [0, *ends, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    stages = balance(costs, pp, first, last)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(len(stage) for stage in stages)
    possible = itertools.combinations(range(1, len(costs)), pp - 1)
    assert dearest(tuple(stage.stop for stage in stages[:-1])) == min(map(dearest, possible))


@pytest.mark.parametrize(
    ("config", "tp", "says"),
    [
        ("flash", 3, "tp is 3, expected a divisor of 8 (8 output groups) that divides 256 experts"),
        ("flash", 16, "1, 2, 4, 8"),
        ("pro", 16, "1, 2, 4, 8"),
        ("small", 4, "expected a divisor of 2 (2 output groups) that divides 6 experts: 1, 2"),
    ],
)
def test_a_tp_that_does_not_divide(config: str, tp: int, says: str) -> None:
    with pytest.raises(OptionError) as error:
        RankLayout(tp).check(MODELS[config])
    assert says in str(error.value)


def test_bad_sizes() -> None:
    with pytest.raises(OptionError, match="tp is 0, expected a whole number above 0"):
        RankLayout(0)
    with pytest.raises(OptionError, match="pp is True"):
        RankLayout(1, True)
    with pytest.raises(OptionError, match=r"rank is 4, expected 0 to 3 \(tp 2 x pp 2\)"):
        RankLayout(2, 2, 4, balance([1, 1], 2))
    with pytest.raises(OptionError, match="layers of 0 stages are given, expected 2"):
        RankLayout(1, 2)
    odd = replace(MODELS["flash"], moe_intermediate_size=2044)
    with pytest.raises(OptionError, match=r"experts is 'split' with tp 8, .* inner size 2044 and"):
        RankLayout(8, split_experts=True).check(odd)
    with pytest.raises(OptionError, match="pp is 9, expected 1 to 7"):
        balance([1] * 7, 9)
    with pytest.raises(OptionError, match=r"layers \[0, 1\], expected 0 to 6"):
        RankLayout(1, 2, 0, (range(1), range(1, 2))).check(MODELS["small"])
