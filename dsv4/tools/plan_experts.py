"""Predicted times of steps and prompts on one GPU, and what experts in host memory cost. No torch.

A decode step takes its time with all experts on the GPU, plus the time to read the missing ones
over the bus. A prompt copies all missing experts once per chunk, overlapping its products. Bus
rates were measured on an H200 machine (PCIe 5 x16); cards with PCIe 4 have half of them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.runner.experts.budget import COPY_GBS, ExpertBudget
from dsv4.runner.experts.choose_memory import ExpertChoice
from dsv4.runner.ranks.cluster import PCIE5_GBS, Cluster
from dsv4.runner.ranks.forecast import WeightSizes, forecast
from dsv4.runner.settings import Settings

BATCHES, PROMPT = (1, 32), 8192


@dataclass(frozen=True)
class ResidentTimes:
    """Milliseconds with all experts on the GPU, predicted."""

    step_ms: dict[int, float]  # by sequences per step
    prompt_ms: float


@dataclass(frozen=True)
class ExpertPlan:
    """Milliseconds are predicted. Keys of `step_ms`: routing, then sequences per step."""

    budget: ExpertBudget
    resident_share: float
    gpu_bytes: int
    host_bytes: int
    step_ms: dict[str, dict[int, float]]
    all_resident_ms: dict[int, float]
    prompt_ms: float
    all_resident_prompt_ms: float
    bus_gbs: float  # assumed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def resident_times(
    nbytes: dict[str, int], config: ModelConfig, cluster: Cluster, settings: Settings
) -> ResidentTimes:
    """`nbytes`: of each parameter on a GPU."""
    geometry = settings.geometry(config)
    found = forecast(WeightSizes(config, nbytes), cluster, geometry, 1, 1, BATCHES, PROMPT)
    return ResidentTimes({batch: found.steps[batch].total for batch in BATCHES}, found.prompt_ms)


def plan_experts(
    nbytes: dict[str, int],
    config: ModelConfig,
    cluster: Cluster,
    choice: ExpertChoice,
    exponent: float = 1.0,
) -> ExpertPlan:
    """`nbytes`: of each parameter on a GPU; `exponent`: of skewed routing."""
    if not 0 <= exponent <= 10:
        raise OptionError(f"zipf is {exponent:g}, expected an exponent from 0 to 10")
    budget = choice.budget
    assert budget is not None
    found = resident_times(nbytes, config, cluster, choice.settings)
    resident = found.step_ms
    bus = cluster.gpu.bus_gbs
    steps = {
        name: {
            batch: resident[batch] + missing_bytes(budget, config, batch, skew) / bus / 1e6
            for batch in BATCHES
        }
        for name, skew in (("even", 0.0), (f"zipf {exponent:g}", exponent))
    }
    chunks = -(-PROMPT // choice.settings.chunk_tokens)
    staged = min(budget.missing, budget.staged * budget.num_layers) * budget.block_bytes
    in_place = budget.missing * budget.block_bytes - staged
    prompt = max(found.prompt_ms, chunks * staged / (COPY_GBS * bus / PCIE5_GBS) / 1e6)
    prompt += chunks * in_place / bus / 1e6
    return ExpertPlan(
        budget, budget.resident_share, budget.gpu_bytes, budget.host_bytes, steps, resident,
        prompt, found.prompt_ms, bus,
    )  # fmt: skip


def missing_bytes(budget: ExpertBudget, config: ModelConfig, batch: int, exponent: float) -> float:
    """Read over the bus in a step of `batch` sequences, with the most visited experts resident."""
    chances = visit_chances(config.num_experts, config.num_experts_per_tok, exponent)
    kept = budget.slots / budget.num_layers  # of each layer, the first by rank
    total = 0.0
    for rank, chance in enumerate(chances):
        share = min(max(rank + 1 - kept, 0.0), 1.0) if exponent else 1 - budget.resident_share
        total += share * (1 - (1 - chance) ** batch)
    return total * budget.num_layers * budget.block_bytes


@cache
def visit_chances(experts: int, chosen: int, exponent: float) -> Sequence[float]:
    """By rank, the chance that a token visits an expert: draws without replacement, proportional to
    rank ** -exponent. As if experts arrived at random times until `chosen` are there."""
    weights = [rank**-exponent for rank in range(1, experts + 1)]
    if chosen == experts:
        return [1.0] * experts
    low, high = 0.0, 1.0

    def chances(time: float) -> list[float]:
        return [-math.expm1(-time * weight) for weight in weights]

    while sum(chances(high)) < chosen:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(chances(middle)) < chosen else (low, middle)
    return chances(high)


def lines_of(plan: ExpertPlan | ResidentTimes) -> list[str]:
    """For the terminal."""
    if isinstance(plan, ResidentTimes):
        found = [f"{_step_text(batch)}: {ms:.1f} ms" for batch, ms in plan.step_ms.items()]
        return [*found, f"{_PROMPT_TEXT}: {plan.prompt_ms:.0f} ms", "times are predicted, not run"]
    found = [str(plan.budget)]
    for batch, resident in plan.all_resident_ms.items():
        times = ", ".join(f"{ms[batch]:.1f} ms ({name})" for name, ms in plan.step_ms.items())
        found.append(f"{_step_text(batch)}: {times}; {resident:.1f} ms with all experts on the GPU")
    found.append(
        f"{_PROMPT_TEXT}: {plan.prompt_ms:.0f} ms; "
        f"{plan.all_resident_prompt_ms:.0f} ms with all experts on the GPU"
    )
    found.append(f"times are predicted from {plan.bus_gbs:g} GB/s over the bus")
    return found


_PROMPT_TEXT = f"a prompt of {PROMPT:,} tokens"


def _step_text(batch: int) -> str:
    return "a token of one sequence" if batch == 1 else f"a step of {batch} sequences"
