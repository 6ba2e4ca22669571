"""`doctor` sees wrong sampling on any machine, and finds nothing where nothing is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dsv4.ops.sample.sample as sample_op
import dsv4.runner.forward as step_parts
from dsv4.ops.sample.sample import IN_PROMPT, SampleInputs
from dsv4.tools.doctor.device.sampling import SETTINGS, check_sampling

PLAIN = "temperature 1.0"


def wrong_cases(*names: str) -> dict[str, str]:
    chosen = [item for item in SETTINGS if item.name.startswith(names)]
    found = check_sampling("cpu", chosen)
    return {item.case: item.detail for item in found if item.status == "wrong"}


def test_nothing_is_wrong() -> None:
    results = list(check_sampling("cpu"))
    assert [item.detail for item in results if item.status != "ok"] == []
    assert len(results) == 2 * len(SETTINGS)


def changed(**changes: Callable[[SampleInputs], Tensor | None]) -> Any:
    """The op gets other settings than the requests have."""
    right = step_parts.sample

    def wrong(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
        other = {name: change(inputs) for name, change in changes.items()}
        return right(logits, replace(inputs, **other))

    return patch.object(step_parts, "sample", wrong)


def ones(name: str) -> Callable[[SampleInputs], Tensor]:
    return lambda inputs: torch.ones_like(getattr(inputs, name))


def top_p_too_narrow() -> Any:
    right = sample_op._kept

    def wrong(row: Tensor, inputs: SampleInputs, i: int) -> Tensor:
        narrow = torch.where(inputs.top_p < 1, inputs.top_p * 0.7, inputs.top_p)
        return right(row, replace(inputs, top_p=narrow), i)

    return patch.object(sample_op, "_kept", wrong)


def top_p_of_everything() -> Any:
    """Top-p as if top-k had left everything: more tokens pass."""
    right = sample_op._kept

    def wrong(row: Tensor, inputs: SampleInputs, i: int) -> Tensor:
        alone = {"top_k": inputs.top_k * 0}, {"top_p": torch.ones_like(inputs.top_p)}
        return right(row, replace(inputs, **alone[0]), i) & right(
            row, replace(inputs, **alone[1]), i
        )

    return patch.object(sample_op, "_kept", wrong)


def drawn_only(inputs: SampleInputs) -> Tensor:
    return (inputs.temperature > 0).to(inputs.temperature)


FAULTS = {
    "temperature ignored": (lambda: changed(temperature=drawn_only), "temperature 0.5"),
    "top-p keeps too few": (top_p_too_narrow, "top_p 0.8"),
    "top-p ignored": (lambda: changed(top_p=ones("top_p")), "top_p 0.8"),
    "top-k one short": (lambda: changed(top_k=lambda s: (s.top_k - 1).clamp(min=0)), "top_k 4"),
    "top-p before top-k": (top_p_of_everything, "top_k 5, top_p 0.8"),
    "min-p ignored": (lambda: changed(min_p=lambda s: s.min_p * 0), "min_p 0.15"),
    "bias ignored": (lambda: changed(bias=lambda s: s.bias * 0), "logit_bias"),
    "repetition ignored": (lambda: changed(repetition=ones("repetition")), "repetition_penalty"),
    "presence ignored": (lambda: changed(presence=lambda s: s.presence * 0), "presence_penalty"),
    "frequency once": (
        lambda: changed(seen=lambda s: s.seen.clamp(max=1) | (s.seen & IN_PROMPT)),
        "frequency_penalty",
    ),
    "prompt not penalised": (
        lambda: changed(seen=lambda s: s.seen & (IN_PROMPT - 1)),
        "repetition_penalty",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_sampling_is_named(name: str) -> None:
    plant, setting = FAULTS[name]
    with plant():
        found = wrong_cases(PLAIN, setting)
    assert found
    assert all(label.startswith(setting) for label in found), found


def test_other_random_numbers_are_fine_and_equal_ones_are_not() -> None:
    def seeded(change: Callable[[Tensor], Tensor]) -> Any:
        return changed(seeds=lambda inputs: change(inputs.seeds))

    with seeded(lambda seeds: seeds + 12345):
        assert wrong_cases(PLAIN, "top_k") == {}
    with seeded(torch.zeros_like):
        assert "temperature 1.0, drawn" in wrong_cases(PLAIN)


def test_wrong_log_probabilities_are_named() -> None:
    right = step_parts.sample

    def wrong(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
        tokens, norms = right(logits, inputs)
        return tokens, norms + 0.01

    with patch.object(step_parts, "sample", wrong):
        assert "log-probability" in wrong_cases(PLAIN)["temperature 1.0, greedy"]
