"""Counter-based random numbers (Philox 4x32, ten rounds): a function of seed and counter only."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of `a * b`, for 32-bit values held in int64."""
    low_part = a * (b & 0xFFFF)
    high = (a * (b >> 16) + (low_part >> 16)) >> 16
    return high & _MASK, (a * b) & _MASK


def philox(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four 32-bit words (in int64) for each counter, `[..., 4]`; a tensor of seeds broadcasts."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform_rows(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """`[rows, size]` numbers in (0, 1), fp32; a row is one sampled position of one request.

    Number `i` is word `i % 4` of counter `(i // 4, position, 0, 0)`; 23 bits and a half, so
    neither 0 nor 1 can occur.
    """
    blocks = torch.arange(-(-size // 4), device=seeds.device).expand(seeds.shape[0], -1)
    zero = torch.zeros_like(blocks)
    counter = (blocks, zero + positions.unsqueeze(1), zero, zero)
    words = philox(seeds.unsqueeze(1), counter).flatten(1)[:, :size]
    return ((words >> 9).float() + 0.5) * 2.0**-23
