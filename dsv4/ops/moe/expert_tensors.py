"""What kernels of experts share: both kinds' tensors, ranges of K, room for partial sums."""

import math
from typing import Any, NamedTuple

import torch

from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.weights.tiled import TiledMxfp4

LONG_STEPS = 8  # K of at least this many steps of 128 columns has two ranges


class ExpertTensors(NamedTuple):
    words: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor


def expert_weights(weight: Any, shared: Any) -> tuple[Any, ...]:
    """The routed experts' tensors and the offsets to the shared expert's. Kernels take offsets as
    64 bits; otherwise each layer's values would decide which variants are compiled."""
    own = ExpertTensors(weight.packed, weight.scale, weight.global_scale)
    if shared is None:
        return own, 0, 0, 0
    pairs = zip(own, (shared.packed, shared.scale, shared.global_scale), strict=True)
    return own, *((b.data_ptr() - a.data_ptr()) // a.element_size() for a, b in pairs)


def is_mx(weight: Any) -> bool:
    return isinstance(weight, TiledMxfp4)


def num_expert_ranges(weight: Any) -> int:
    """Ranges of K; a pure function of the shape, because it fixes the order of summation."""
    return 2 if weight.num_steps >= LONG_STEPS else 1


def partial_sums(z: torch.Tensor, num_places: int, w2: Any) -> torch.Tensor:
    shape = (num_places, num_expert_ranges(w2), w2.rows)
    expert_sums = workspace(z.device, "experts_partial_sums", math.prod(shape), torch.float32)
    return expert_sums[: math.prod(shape)].view(shape)
