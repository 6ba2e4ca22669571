"""Loads experts into their places, a few at a time, without a second copy of a layer."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dsv4.cache.fingerprint import sampled_digest
from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.ops.moe.placed import BlockLayout
from dsv4.runner.experts.budget import ExpertBudget, check_host_memory, fit_experts
from dsv4.runner.experts.choose_memory import ExpertChoice
from dsv4.runner.experts.host_memory import free_host_memory
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.experts.usage import ExpertProfile, ExpertUse, read_profile
from dsv4.runner.ranks.cluster import PCIE5_GBS, host_gbs
from dsv4.runner.settings import Settings

log = logging.getLogger(__name__)

_MATRICES = ("w13", "w2")


class PlacedWeights:
    """Takes the routed experts out of a stream of weights."""

    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self._next: dict[tuple[int, int], int] = {}  # next expert, by layer and matrix

    def take(self, name: str, weight: Weight) -> bool:
        """Put some of a layer's experts into their places; False if the weight is not experts."""
        parts = name.split(".")
        if parts[0] != "layers" or parts[2:4] != ["ffn", "experts"]:
            return False
        key = int(parts[1]), _MATRICES.index(parts[4])
        self._next[key] = self.swapper.residency.fill(*key, self._next.get(key, 0), weight)
        return True

    def weights(self) -> dict[str, Weight]:
        """The placed experts by name, once all are read."""
        residency = self.swapper.residency
        found: dict[str, Weight] = {}
        for layer in range(residency.budget.num_layers):
            for matrix, weight in zip(_MATRICES, residency.experts(layer), strict=True):
                found[f"layers.{layer}.ffn.experts.{matrix}"] = weight
        return found


def open_experts(
    choice: ExpertChoice,
    config: ModelConfig,
    settings: Settings,
    examples: Callable[[], tuple[Weight, Weight]],
    folder: Path | None = None,
) -> PlacedWeights:
    """Allocate slots, host memory and tables, before the first expert is read. `folder`: of the
    model; None: random weights."""
    layout = BlockLayout.of(*examples())
    counts = config.num_layers, config.num_experts, layout.nbytes
    budget = fit_experts(choice.room, *counts, config.num_experts_per_tok) or _all_but_one(*counts)
    profile = None
    if settings.expert_profile is not None:
        about = "random weights", "random"
        if folder is not None:
            about = folder.resolve().name, sampled_digest(folder)
        profile = ExpertProfile(Path(settings.expert_profile), *about)
    return PlacedWeights(make_swapper(layout, budget, profile, torch.device(settings.device)))


def _all_but_one(layers: int, experts: int, block_bytes: int) -> ExpertBudget:
    """Experts are stored smaller than planned, and all would fit: all but one stay."""
    return ExpertBudget(layers, experts, block_bytes, layers * experts - 1, 1)


def make_swapper(
    layout: BlockLayout, budget: ExpertBudget, profile: ExpertProfile | None, device: torch.device
) -> Swapper:
    shape = budget.num_layers, budget.num_experts
    use = ExpertUse(np.zeros(shape) if profile is None else read_profile(profile, *shape))
    log.warning("%s", budget)  # logged at every start: it decides the speed
    check_host_memory(budget, free_host_memory())
    residency = Residency(layout, budget, use.first_residents(budget.slots), device)
    on_gpu = device.type == "cuda"
    bus = host_gbs(torch.cuda.get_device_name(device)) if on_gpu else PCIE5_GBS
    return Swapper(residency, use, profile, bus)
