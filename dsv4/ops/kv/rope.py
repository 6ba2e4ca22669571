"""Rotary embedding on the last channels, interleaved pairs, and its frequencies.

Pair `i` of the rotary tail is channels `(2i, 2i + 1)`; `(u, v) -> (u cos - v sin, v cos + u sin)`
with the angle `position * frequency_i`. The inverse rotation uses `-sin`. fp32 throughout, one
rounding at the end.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape


def rope_frequencies(rope_dim: int, theta: float) -> Tensor:
    """Plain frequencies `theta^(-2i / rope_dim)`, fp32 `[rope_dim / 2]`."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim
    return 1.0 / (theta**exponents)


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    factor: float,
    original_len: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Frequencies with YaRN's interpolation: slow pairs divided by `factor`, fast ones kept."""
    plain = rope_frequencies(rope_dim, theta)
    if factor == 1.0:
        return plain

    def dimension(rotations: float) -> float:
        return rope_dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high: float = min(math.ceil(dimension(beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + (plain / factor) * ramp


def rope_reference(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
    rope_dim = 2 * frequencies.shape[0]
    head, tail = x[..., :-rope_dim], x[..., -rope_dim:].float()
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = angles.view(*positions.shape, *[1] * (x.dim() - 1 - positions.dim()), rope_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin = -sin
    u, v = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)


def cases() -> Iterable[Case]:
    def build(shape: tuple[int, ...], rope_dim: int, start: int, inverse: bool) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = torch.randn(*shape, generator=generator)
            positions = torch.arange(start, start + shape[0])
            frequencies = yarn_frequencies(rope_dim, 160000.0, 16.0, 65536, 32.0, 1.0)
            return {"x": x, "positions": positions, "frequencies": frequencies, "inverse": inverse}

        direction = "inverse" if inverse else "forward"
        return Case(f"{shape} rope {rope_dim} from {start} {direction}", make, 1e-5, 1e-5)

    yield build((3, 512), 64, 0, False)
    yield build((5, 7, 32), 16, 1000, False)
    yield build((4, 8, 512), 64, 1_000_000, True)
    yield build((0, 2, 128), 64, 0, False)


OP = Op("rope", rope_reference, cases, kernels=(Kernel("dsv4.ops.kv.rope_triton"),))


def check_rotation(op: str, name: str, x: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    check_shape(op, "positions", positions, x.shape[0])
    found, needed = x.shape[-1], 2 * frequencies.shape[0]
    if needed > found:
        raise KernelError(f"{op}: {needed // 2} frequencies, {name} has {found} channels")


def rope(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the tail of `x` `[tokens, ..., dim]` at `positions` `[tokens]`."""
    check_rotation(OP.name, "x", x, positions, frequencies)
    if x.numel() == 0:
        return torch.empty_like(x)
    return OP(x.device, x=x, positions=positions, frequencies=frequencies, inverse=inverse)
