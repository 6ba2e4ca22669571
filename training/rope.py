"""Tables of cosines and sines, and the rotation of the last channels, differentiable."""

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.attention import layer_frequencies

Angles = tuple[Tensor, Tensor]  # cos and sin, [positions, pairs]


def angles(config: ModelConfig, ratio: int, positions: Tensor) -> Angles:
    frequencies = layer_frequencies(config, ratio).to(positions.device)
    turned = positions.float()[:, None] * frequencies
    return turned.cos(), turned.sin()


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
