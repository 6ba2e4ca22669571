"""From logits to tokens: known random numbers, right frequencies, filters and penalties."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.ops.sample.random import philox, uniform_rows
from dsv4.ops.sample.sample import BIAS, IN_PROMPT, MASK, PENALTIES, SampleInputs, sample


def settings(rows: int, **changes: Any) -> SampleInputs:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value)

    base = SampleInputs(
        temperature=full(1.0),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=full(1.0),
        min_p=full(0.0),
        repetition=full(1.0),
        presence=full(0.0),
        frequency=full(0.0),
        seeds=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(rows),
        slots=torch.arange(rows),
        flags=torch.zeros(rows, dtype=torch.int64),
        seen=None,
        bias=None,
        mask=None,
    )
    given = {
        name: full(value) if isinstance(value, int | float) else value
        for name, value in changes.items()
    }
    if "top_k" in given:
        given["top_k"] = given["top_k"].long()
    return replace(base, **given)


def words(seed: int, counter: tuple[int, int, int, int]) -> list[str]:
    parts = tuple(torch.tensor([c]) for c in counter)
    return [f"{word:08x}" for word in philox(seed, parts)[0].tolist()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], expected: str
) -> None:
    assert words(key[0] | key[1] << 32, counter) == expected.split()


def test_philox_takes_any_signed_seed() -> None:
    assert words(-1, (0xFFFFFFFF,) * 4)[0] == "408f276d"  # type: ignore[arg-type]


def _uniform(seed: int, position: int, size: int) -> torch.Tensor:
    return uniform_rows(torch.tensor([seed]), torch.tensor([position]), size)[0]


def test_uniform_numbers() -> None:
    row = _uniform(5, 9, 100_001)
    assert row.shape == (100_001,)
    assert 0 < row.min() < 1e-4
    assert 1 - 1e-4 < row.max() < 1
    assert row.mean() == pytest.approx(0.5, abs=0.005)
    assert row.var() == pytest.approx(1 / 12, abs=0.002)
    # a function of seed and position: a longer row begins with the shorter one
    assert torch.equal(_uniform(5, 9, 10), row[:10])
    for other in (_uniform(5, 10, 10), _uniform(6, 9, 10)):
        assert not torch.equal(other, row[:10])
    assert not torch.equal(_uniform(5 + 2**40, 9, 10), row[:10])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    total = counts.sum()
    expected = probabilities.double() * total
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0])
    rows = 1500
    tokens, _ = sample(
        logits.expand(rows, -1).contiguous(), settings(rows, temperature=temperature)
    )
    counts = torch.bincount(tokens, minlength=6).double()
    expected = torch.softmax(logits.double() / temperature, 0)
    # 5 degrees of freedom: beyond 20.5 once in a thousand; seeds are fixed, so it never flickers
    assert chi_square(counts, expected) < 20.5
    wrong = torch.softmax(logits.double() / (temperature * 1.5), 0)
    assert chi_square(counts, wrong) > 20.5, "the test could not tell a wrong temperature"


def test_seeds_and_positions_decide_alone() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(40) % 4
    positions = torch.arange(40) // 4
    inputs = settings(40, seeds=seeds, positions=positions)
    tokens, _ = sample(logits, inputs)
    assert torch.equal(sample(logits, inputs)[0], tokens)
    same_row = logits[:1].expand(40, -1).contiguous()
    varied, _ = sample(same_row, inputs)
    assert len(set(varied.tolist())) > 5
    repeated, _ = sample(same_row, settings(40, positions=torch.zeros(40, dtype=torch.int64)))
    assert len(set(repeated.tolist())) == 1


def drawn(logits: list[float], rows: int = 120, **changes: Any) -> set[int]:
    row = torch.tensor(logits).expand(rows, -1).contiguous()
    return set(sample(row, settings(rows, **changes))[0].tolist())


FLAT = [0.1, 0.0, 0.3, 0.2, -0.1]  # sorted: 2 3 0 1 4


@pytest.mark.parametrize(
    ("k", "kept"),
    [
        (1, {2}),
        (2, {2, 3}),
        (4, {0, 1, 2, 3}),
        (5, set(range(5))),
        (99, set(range(5))),
        (0, set(range(5))),
    ],
)
def test_top_k(k: int, kept: set[int]) -> None:
    assert drawn(FLAT, top_k=k) == kept


def test_top_k_ties_go_to_the_lower_id() -> None:
    assert drawn([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-6, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.74, {0, 1}),
        (0.76, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert drawn(logits, top_p=top_p) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2}), (0.24, {0, 1, 2}), (0.3, {0, 1}), (0.6, {0}), (1.0, {0})]
)
def test_min_p_is_relative_to_the_best(min_p: float, kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125)]
    assert drawn(logits, min_p=min_p) == kept


def test_filters_come_after_temperature() -> None:
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert drawn(logits, top_p=0.5, temperature=1.0) == {0}
    assert drawn(logits, top_p=0.5, temperature=3.0) == {0, 1}


def test_filtered_frequencies_are_renormalised() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -4.0])
    rows = 1500
    tokens, _ = sample(logits.expand(rows, -1).contiguous(), settings(rows, top_k=2))
    counts = torch.bincount(tokens, minlength=4).double()[:2]
    assert chi_square(counts, torch.softmax(logits[:2].double(), 0)) < 10.8  # 1 degree


def test_greedy_takes_the_largest_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    tokens, _ = sample(logits, settings(2, temperature=0.0))
    assert tokens.tolist() == [1, 0]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(2, 9)
    loud = settings(
        2,
        temperature=0.3,
        repetition=2.0,
        flags=torch.tensor([BIAS | PENALTIES] * 2),
        bias=torch.full((2, 9), 5.0),
        seen=torch.full((2, 9), IN_PROMPT + 1, dtype=torch.int32),
        mask=torch.zeros(2, 1, dtype=torch.int32),
    )
    _, norms = sample(logits, loud)
    torch.testing.assert_close(logits - norms[:, None], torch.log_softmax(logits, 1))


def greedy_after(logits: list[float], prompt: list[int], output: list[int], **changes: Any) -> int:
    seen = torch.tensor([prompt]).clamp(max=1) * IN_PROMPT + torch.tensor([output])
    wide = {
        "seen": seen.int(),
        "bias": torch.zeros(1, len(logits)),
        "mask": torch.zeros(1, 1, dtype=torch.int32),
        "flags": torch.tensor([BIAS | PENALTIES]),
    }
    inputs = settings(1, **{"temperature": 0.0, **wide, **changes})
    return int(sample(torch.tensor([logits]), inputs)[0])


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    # 4 / 2 = 2 < 3; the prompt counts as well as the output
    assert greedy_after([4.0, 3.0], [1, 0], [0, 0], repetition=2.0) == 1
    assert greedy_after([4.0, 3.0], [0, 0], [1, 0], repetition=2.0) == 1
    assert greedy_after([4.0, 1.9], [3, 0], [5, 0], repetition=2.0) == 0  # not once per use
    assert greedy_after([-1.0, -1.5], [1, 0], [0, 0], repetition=2.0) == 1  # -2 < -1.5
    assert greedy_after([4.0, 3.0], [0, 0], [0, 0], repetition=2.0) == 0


def test_presence_and_frequency_count_output_only() -> None:
    assert greedy_after([2.0, 1.5], [9, 0], [0, 0], presence=1.0, frequency=1.0) == 0
    assert greedy_after([2.0, 1.5], [0, 0], [1, 0], presence=1.0) == 1
    assert greedy_after([2.0, 1.5], [0, 0], [4, 0], presence=0.4) == 0  # once, however often
    assert greedy_after([2.0, 1.5], [0, 0], [1, 0], frequency=0.4) == 0
    assert greedy_after([2.0, 1.5], [0, 0], [2, 0], frequency=0.4) == 1
    assert greedy_after([2.0, 1.9], [0, 0], [0, 1], presence=-0.2) == 1  # a reward


def test_bias_comes_before_penalties() -> None:
    # with the bias the logit is +4 and is halved to 2; the other order would give -1 + 5
    inputs = {"bias": torch.tensor([[5.0, 0.0]]), "repetition": 2.0}
    assert greedy_after([-1.0, 3.0], [1, 0], [0, 0], **inputs) == 1


def test_a_mask_forbids_whatever_the_bias_wants() -> None:
    inputs = {
        "flags": torch.tensor([BIAS | MASK]),
        "bias": torch.tensor([[0.0, 99.0, 0.0]]),
        "mask": torch.tensor([[0b101]], dtype=torch.int32),
    }
    assert greedy_after([1.0, 5.0, 2.0], [0] * 3, [0] * 3, **inputs) == 2


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    """As transformers and vLLM: probabilities are normalised again after top-k. Of 0.4, 0.3, 0.2
    and 0.1, top-k 2 leaves 4/7 and 3/7, and half of that is the first alone."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(2000, -1).contiguous()
    seeds = torch.arange(2000)
    both = settings(2000, top_k=2, top_p=0.5, seeds=seeds)
    assert sample(logits, both)[0].unique().tolist() == [0]
    wider = settings(2000, top_k=2, top_p=0.6, seeds=seeds)
    assert sample(logits, wider)[0].unique().tolist() == [0, 1]
    alone = settings(2000, top_p=0.5, seeds=seeds)
    assert sample(logits, alone)[0].unique().tolist() == [0, 1]


@pytest.mark.parametrize(("k", "p"), [(0, 0.7), (5, 1.0), (5, 0.7), (3, 0.35), (40, 0.05)])
def test_transformers_keeps_the_same_tokens(k: int, p: float) -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(k)) * 2
    kept = TopKLogitsWarper(k)(None, logits) if k else logits
    kept = TopPLogitsWarper(p)(None, kept) if p < 1 else kept
    rows = 4000
    inputs = settings(rows, top_k=k, top_p=p, seeds=torch.arange(rows))
    drawn, _ = sample(logits.expand(rows, -1).contiguous(), inputs)
    wanted = torch.nonzero(kept[0] > float("-inf")).flatten()
    likely = wanted[torch.softmax(kept[0], 0)[wanted] > 0.005]
    found = set(drawn.unique().tolist())
    assert found <= set(wanted.tolist())
    assert set(likely.tolist()) <= found


def test_rows_may_differ() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(3, -1).contiguous()
    inputs = settings(3, temperature=torch.tensor([0.0, 1.0, 1.0]), top_k=torch.tensor([0, 1, 3]))
    assert sample(logits, inputs)[0].tolist()[:2] == [2, 2]


def test_no_rows() -> None:
    tokens, norms = sample(torch.zeros(0, 5), settings(0))
    assert tokens.shape == (0,)
    assert norms.shape == (0,)


# --- filters at their exact border: a quarter each, so that nothing is rounded --------------------


def drawn_of_four(**filters: float) -> set[int]:
    """Every token that comes up in many draws."""
    tokens, _ = sample(torch.zeros(200, 4), settings(200, **filters))
    return set(tokens.tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.375, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)]
)
def test_top_p_stops_as_soon_as_its_mass_is_reached(top_p: float, kept: int) -> None:
    assert drawn_of_four(top_p=top_p) == set(range(kept))


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert drawn_of_four(top_k=2, top_p=0.5) == {0}
    assert drawn_of_four(top_k=2, top_p=0.501) == {0, 1}


def test_min_p_keeps_what_is_exactly_as_likely() -> None:
    assert drawn_of_four(min_p=1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_top_k_keeps_lower_ids_of_a_tie(top_k: int) -> None:
    assert drawn_of_four(top_k=top_k) == set(range(top_k))


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.8, "top_k": 9.0}])
def test_a_row_with_nan_has_no_log_probability_and_leaves_others_alone(
    rows: int, how: dict[str, float]
) -> None:
    """By few rows on a CPU and by the reference."""
    logits = torch.randn(rows, 30, generator=torch.Generator().manual_seed(1))
    tokens, norms = sample(logits, settings(rows, **how))
    bad = logits.clone()
    bad[0, 7], bad[1], bad[2, 29] = math.nan, -math.inf, math.inf
    found, found_norms = sample(bad, settings(rows, **how))
    assert not found_norms[:3].isfinite().any()
    assert (found[:3] == -1).all()
    assert torch.equal(found[3:], tokens[3:])
    assert torch.equal(found_norms[3:], norms[3:])
