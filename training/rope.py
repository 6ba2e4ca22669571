"""Tables of cosines and sines, and the rotation of the last channels, differentiable."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.attention import layer_frequencies
from dsv4.ops.kv.rope import rope_frequencies

Angles = tuple[Tensor, Tensor]  # cos and sin, [positions, pairs]


class Rotation(NamedTuple):
    """What a layer rotates by; without a mistake all three come from one table."""

    tokens: Angles  # queries, window keys, and back again
    index_queries: Angles
    entries: Angles  # one row for each compressed entry


def angles(frequencies: Tensor, positions: Tensor) -> Angles:
    turned = positions.float()[:, None] * frequencies.to(positions.device)
    return turned.cos(), turned.sin()


def rotations(
    config: ModelConfig, ratio: int, positions: Tensor, mistake: str, strength: int
) -> Rotation:
    right = layer_frequencies(config, ratio)
    tokens = index_queries = angles(right, positions)
    if ratio and mistake == "plain-base-in-compressed-layers":
        tokens = angles(rope_frequencies(config.rope_head_dim, config.rope_theta), positions)
    if not ratio and mistake == "yarn-in-window-layers":
        same_base = replace(config, compress_rope_theta=config.rope_theta)
        tokens = angles(layer_frequencies(same_base, 4), positions)
    step = max(ratio, 1)
    first = positions[: len(positions) // step * step : step]
    late = strength * (ratio - 1) if mistake == "rope-at-last-token" else 0
    return Rotation(tokens, index_queries, angles(right, first + late))


def rotate(x: Tensor, table: Angles, *, inverse: bool = False) -> Tensor:
    """`x` `[batch, positions, ..., dim]`; interleaved pairs of the last channels are turned."""
    cos, sin = table
    pairs = cos.shape[-1]
    shape = (1, cos.shape[0]) + (1,) * (x.dim() - 3) + (pairs,)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    head, tail = x[..., : -2 * pairs], x[..., -2 * pairs :].float()
    u, v = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)
