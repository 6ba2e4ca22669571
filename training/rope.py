"""How far each layer rotates: the engine's own frequencies, or wrong ones on purpose."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.attention import layer_frequencies
from dsv4.ops.kv.rope import rope_frequencies
from dsv4.tools.formulas import angles


class Rotation(NamedTuple):
    """Angles `[positions, pairs]` of a layer; without a mistake all from one table."""

    tokens: Tensor  # queries, window keys, and the rotation back
    index_queries: Tensor
    entries: Tensor  # one row for each compressed entry


def rotations(
    config: ModelConfig, ratio: int, positions: Tensor, mistake: str, strength: int
) -> Rotation:
    right = layer_frequencies(config, ratio)
    tokens = index_queries = angles(positions, right.to(positions.device))
    if ratio and mistake == "plain-base-in-compressed-layers":
        wrong = rope_frequencies(config.rope_head_dim, config.rope_theta)
        tokens = angles(positions, wrong.to(positions.device))
    if not ratio and mistake == "yarn-in-window-layers":
        same_base = replace(config, compress_rope_theta=config.rope_theta)
        tokens = angles(positions, layer_frequencies(same_base, 4).to(positions.device))
    step = max(ratio, 1)
    first = positions[: len(positions) // step * step : step]
    late = strength * (ratio - 1) if mistake == "rope-at-last-token" else 0
    return Rotation(tokens, index_queries, angles(first + late, right.to(positions.device)))
