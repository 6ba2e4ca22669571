"""FP8: E4M3 elements with a scale per group of channels, or per tile of a weight matrix.

Groups (activations, the KV latent) carry power-of-two scales as E8M0 bytes; tiles (weights) carry
E8M0 bytes or float32. A tile is (rows, columns): a square in the official files, one row in files
with a scale per channel, the whole matrix in files with one scale. The stored scale multiplies.
"""

from math import ceil

import torch

from dsv4.formats import e8m0
from dsv4.formats.groups import expand, grouped_amax, refuse_nonfinite
from dsv4.formats.spec import E4M3_MAX, FP8_BLOCK

AMAX_FLOOR = 1e-4  # the model was trained with this floor; it is part of the format


def encode(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3, ties to even, saturating at 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_groups(
    x: torch.Tensor, group: int, *, check: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 data [..., C] and E8M0 scale bytes [..., ceil(C / group)].

    The scale is 2^ceil(log2(max(amax, 1e-4) / 448)). `check=False` skips the search for NaN and
    Inf (a device synchronisation); such values then stay NaN in the data.
    """
    x = x.to(torch.float32)
    if check:
        refuse_nonfinite(x, "FP8 groups")
    amax = grouped_amax(x, group).clamp(min=AMAX_FLOOR)
    exponent = e8m0.ceil_exponent(amax, E4M3_MAX)
    inverse = e8m0.decode(e8m0.from_exponent(-exponent))
    data = encode(x * expand(inverse, group, x.shape[-1]))
    return data, e8m0.from_exponent(exponent)


def dequantize_groups(
    data: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of `quantize_groups`; `scale` is E8M0 bytes (uint8) or float32."""
    factor = e8m0.decode(scale) if scale.dtype == torch.uint8 else scale.to(torch.float32)
    return (data.to(torch.float32) * expand(factor, group, data.shape[-1])).to(dtype)


def expand_tiles(
    scale: torch.Tensor, tile: int | tuple[int, int], rows: int, cols: int
) -> torch.Tensor:
    """One scale per tile -> one per element, as float32: [..., R, C] -> [..., rows, cols]."""
    tile_rows, tile_cols = (tile, tile) if isinstance(tile, int) else tile
    factor = e8m0.decode(scale) if scale.dtype == torch.uint8 else scale.to(torch.float32)
    factor = factor.repeat_interleave(tile_rows, dim=-2)[..., :rows, :]
    return factor.repeat_interleave(tile_cols, dim=-1)[..., :cols]


def quantize_tiles(
    w: torch.Tensor, block: int = FP8_BLOCK, *, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., N, K] as E4M3 and one scale per block x block tile (edge tiles are short).

    Power-of-two scales come back as E8M0 bytes, others as float32 amax / 448.
    """
    w = w.to(torch.float32)
    refuse_nonfinite(w, "FP8 tiles")
    rows, cols = w.shape[-2:]
    padded = torch.nn.functional.pad(w, (0, -cols % block, 0, -rows % block))
    grid = (ceil(rows / block), block, ceil(cols / block), block)
    tiles = padded.reshape(*w.shape[:-2], *grid)
    amax = tiles.abs().amax(dim=(-3, -1)).clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        exponent = e8m0.ceil_exponent(amax, E4M3_MAX).clamp(-127, 127)
        scale = e8m0.from_exponent(exponent)
    else:
        scale = amax / E4M3_MAX
    return encode(w / expand_tiles(scale, block, rows, cols)), scale


def dequantize_tiles(
    data: torch.Tensor,
    scale: torch.Tensor,
    tile: int | tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    rows, cols = data.shape[-2:]
    return (data.to(torch.float32) * expand_tiles(scale, tile, rows, cols)).to(dtype)
