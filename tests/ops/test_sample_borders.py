"""Filters at their exact border. All probabilities are powers of two, so nothing is rounded."""

import pytest
import torch

from dsv4.ops.sample.sample import SampleInputs, sample

EQUAL = (0.0, 0.0, 0.0, 0.0)  # a quarter each
DRAWS = 200


def drawn(logits: tuple[float, ...], **filters: float) -> set[int]:
    """Every token that comes up in many draws."""

    def full(value: float) -> torch.Tensor:
        return torch.full((DRAWS,), float(value))

    inputs = SampleInputs(
        temperature=full(1.0),
        top_k=torch.full((DRAWS,), int(filters.get("top_k", 0))),
        top_p=full(filters.get("top_p", 1.0)),
        min_p=full(filters.get("min_p", 0.0)),
        repetition=full(1.0),
        presence=full(0.0),
        frequency=full(0.0),
        seeds=torch.arange(DRAWS),
        positions=torch.zeros(DRAWS, dtype=torch.int64),
        prompt_counts=None,
        output_counts=None,
        bias=None,
    )
    tokens, _ = sample(torch.tensor(logits).expand(DRAWS, -1).contiguous(), inputs)
    return set(tokens.tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, {0}), (0.5, {0, 1}), (0.75, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_stops_as_soon_as_its_mass_is_reached(top_p: float, kept: set[int]) -> None:
    assert drawn(EQUAL, top_p=top_p) == kept


def test_top_p_takes_the_token_that_crosses_the_border() -> None:
    assert drawn(EQUAL, top_p=0.375) == {0, 1}


def test_min_p_keeps_what_is_exactly_as_likely() -> None:
    assert drawn(EQUAL, min_p=1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_top_k_keeps_lower_ids_of_a_tie(top_k: int) -> None:
    assert drawn(EQUAL, top_k=top_k) == set(range(top_k))
