"""MXFP4 (E2M1 with an E8M0 byte per 32 along K) and its exact casts to NVFP4 and FP8 tiles."""

from dataclasses import dataclass

import torch

from dsv4.errors import KernelError
from dsv4.formats import e2m1, e8m0, fp4, fp8
from dsv4.formats.groups import expand
from dsv4.formats.spec import E8M0_BIAS, E8M0_NAN, MXFP4_GROUP, NVFP4_EXACT_SPREAD


@dataclass(frozen=True)
class CastReport:
    """How exact a cast was. `spread` is the largest minus the smallest block exponent."""

    blocks: int
    inexact_blocks: int
    spread: int
    relative_rms: float

    @property
    def exact(self) -> bool:
        return self.inexact_blocks == 0


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [..., N, K] as (packed [..., N, K/2], E8M0 bytes [..., N, K/32])."""
    if w.shape[-1] % MXFP4_GROUP:
        raise KernelError(f"MXFP4 needs K a multiple of 32, found shape {tuple(w.shape)}")
    return fp4.quantize_groups(w, MXFP4_GROUP)


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return fp4.dequantize_groups(packed, scale, MXFP4_GROUP, dtype)


def to_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor | int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CastReport]:
    """The pinned cast of one matrix: (packed, E4M3 scale, global scalar, report).

    `largest` is the largest scale byte, of this matrix or of several that share a global. The
    global is 2^(kmax - 8) and a block of exponent k gets 2^(k - kmax + 8), which E4M3 holds for
    kmax - k up to 17: bit for bit, nibbles untouched. Blocks further down keep the smallest
    scale and have their nibbles halved repeatedly, rounding where a half does not fit.
    """
    if bool((scale == E8M0_NAN).any()):
        raise KernelError("MXFP4 scale byte 255 is NaN; the source is broken")
    if scale.numel() == 0:
        empty = scale.repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
        return packed, empty, torch.ones((), device=packed.device), CastReport(0, 0, 0, 0.0)
    top = int(scale.max()) if largest is None else int(largest)
    spread = top - int(scale.min())
    kmax = top - E8M0_BIAS
    if kmax - 8 < -126:
        raise KernelError(
            f"MXFP4 -> NVFP4 needs a largest block exponent of -118 or above, found {kmax}; "
            "keep the tensor in MXFP4"
        )
    global_ = torch.tensor(2.0 ** (kmax - 8), dtype=torch.float32, device=packed.device)
    below = (top - scale.to(torch.int32)).clamp(max=NVFP4_EXACT_SPREAD)
    # 2^(8-below) as E4M3: normal down to 2^-6, then the subnormals 2^-7, 2^-8, 2^-9
    power = (2.0 ** (8 - below).to(torch.float32)).to(torch.float8_e4m3fn)
    block_scale = power.view(torch.uint8).repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
    num_blocks = scale.numel()
    if spread <= NVFP4_EXACT_SPREAD:
        return packed, block_scale, global_, CastReport(num_blocks, 0, spread, 0.0)
    packed, report = _halve(packed, scale, top, spread)
    return packed, block_scale, global_, report


def _halve(
    packed: torch.Tensor, scale: torch.Tensor, top: int, spread: int
) -> tuple[torch.Tensor, CastReport]:
    """Divide the nibbles of blocks below the window by the missing power of two."""
    missing = (top - scale.to(torch.int32) - NVFP4_EXACT_SPREAD).clamp(min=0)
    shrink = expand(2.0 ** -missing.to(torch.float32), MXFP4_GROUP, packed.shape[-1] * 2)
    values = e2m1.decode_packed(packed)
    wanted = values * shrink
    code = e2m1.encode(wanted)
    error = (e2m1.decode(code) - wanted).reshape(*scale.shape, MXFP4_GROUP)
    inexact = int((error != 0).any(dim=-1).sum())
    size = e8m0.decode(scale).to(torch.float64)[..., None]
    window = 2.0 ** missing.to(torch.float64)[..., None]
    energy = (values.reshape(error.shape).to(torch.float64) * size).square().sum()
    lost = (error.to(torch.float64) * size * window).square().sum()
    rms = float((lost / energy).sqrt()) if float(energy) > 0 else 0.0
    return e2m1.pack(code), CastReport(scale.numel(), inexact, spread, rms)


def to_fp8_tiles(
    packed: torch.Tensor, scale: torch.Tensor, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor, CastReport]:
    """One matrix as FP8 tiles with E8M0 scales: exact where a tile's exponents spread by <= 14."""
    exponent = scale.to(torch.int32) - E8M0_BIAS
    rows, groups = scale.shape
    per_tile = block // MXFP4_GROUP
    pad = (0, -groups % per_tile, 0, -rows % block)
    padded = torch.nn.functional.pad(exponent, pad, value=-(2**20))
    grid = (padded.shape[0] // block, block, padded.shape[1] // per_tile, per_tile)
    tile_exponent = padded.reshape(grid).amax(dim=(1, 3)) - 6  # 6 * 2^6 = 384 fits below 448
    tile_scale = e8m0.from_exponent(tile_exponent)
    values = dequantize(packed, scale)
    data = fp8.encode(values / fp8.expand_tiles(tile_scale, block, *values.shape))
    back = fp8.dequantize_tiles(data, tile_scale, block)
    wrong = (back != values).reshape(rows, groups, MXFP4_GROUP).any(dim=-1)
    norm = float(values.norm())
    rms = float((back - values).norm()) / norm if norm else 0.0
    spread = int(scale.max()) - int(scale.min()) if scale.numel() else 0
    return data, tile_scale, CastReport(scale.numel(), int(wrong.sum()), spread, rms)
