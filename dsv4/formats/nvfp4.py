"""NVFP4: E2M1 elements, one E4M3 scale per 16 along K, one float32 global per matrix.

    w[n, k] = e2m1(q[n, k]) * scale[n, k // 16] * global

The scale choices differ only in how a block's scale is picked; the stored format is the same.
"""

from typing import Literal, get_args

import torch

from dsv4.errors import KernelError, OptionError
from dsv4.formats import e2m1
from dsv4.formats.groups import expand, refuse_nonfinite
from dsv4.formats.spec import E2M1_MAX, E4M3_MAX, NVFP4_GROUP

ScaleChoice = Literal["max", "four-over-six", "mse"]
SCALE_CHOICES: tuple[str, ...] = get_args(ScaleChoice)
_MIN_SCALE = 2.0**-9  # the smallest positive E4M3: a scale is a divisor
_SEARCH = 8  # codes to either side of the amax scale that the mse search tries


def global_scale(amax: torch.Tensor, choice: ScaleChoice = "max") -> torch.Tensor:
    """float32 global of a matrix with largest magnitude `amax`; 1 if it is all zeros.

    `four-over-six` needs headroom above the largest block scale, so it divides by 256, not 448.
    """
    top = 256.0 if choice == "four-over-six" else E4M3_MAX
    # a global below the normal range would lose bits in every product
    scaled = (amax.to(torch.float32) / (E2M1_MAX * top)).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, scaled, torch.ones_like(scaled))


def quantize(
    w: torch.Tensor, choice: ScaleChoice = "max", *, global_: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix [N, K] as (packed [N, K/2], E4M3 scale [N, K/16], global scalar)."""
    if choice not in SCALE_CHOICES:
        raise OptionError(f"scale choice {choice!r}, expected one of {', '.join(SCALE_CHOICES)}")
    if w.dim() != 2 or w.shape[-1] % NVFP4_GROUP:
        raise KernelError(f"NVFP4 needs [N, K] with K a multiple of 16, found {tuple(w.shape)}")
    w = w.to(torch.float32)
    refuse_nonfinite(w, "NVFP4")
    if global_ is None:
        global_ = global_scale(w.abs().amax() if w.numel() else w.new_zeros(()), choice)
    blocks = w.reshape(w.shape[0], -1, NVFP4_GROUP) / global_
    scale = _CHOOSE[choice](blocks)
    code = e2m1.encode(blocks / scale.to(torch.float32)[..., None])
    return e2m1.pack(code.reshape(w.shape)), scale, global_


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(_MIN_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)


def _max_scale(blocks: torch.Tensor) -> torch.Tensor:
    return _to_e4m3(blocks.abs().amax(dim=-1) / E2M1_MAX)


def _error(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    factor = scale.to(torch.float32)[..., None]
    return (e2m1.round_to(blocks / factor) * factor - blocks).square().sum(dim=-1)


def _better(blocks: torch.Tensor, candidates: list[torch.Tensor]) -> torch.Tensor:
    """Per block, the candidate with the least squared error; the first wins a tie."""
    best, least = candidates[0], _error(blocks, candidates[0])
    for scale in candidates[1:]:
        error = _error(blocks, scale)
        wins = error < least
        best = torch.where(wins, scale.view(torch.uint8), best.view(torch.uint8)).view(
            torch.float8_e4m3fn
        )
        least = torch.where(wins, error, least)
    return best


def _four_over_six(blocks: torch.Tensor) -> torch.Tensor:
    amax = blocks.abs().amax(dim=-1)
    return _better(blocks, [_to_e4m3(amax / 6.0), _to_e4m3(amax / 4.0)])


def _mse(blocks: torch.Tensor) -> torch.Tensor:
    start = _max_scale(blocks)
    code = start.view(torch.uint8).to(torch.int16)
    # positive E4M3 codes are ordered like their values: 1 is 2^-9, 0x7E is 448
    steps = sorted(range(-_SEARCH, _SEARCH + 1), key=abs)
    codes = [(code + step).clamp(1, 0x7E).to(torch.uint8) for step in steps]
    return _better(blocks, [item.view(torch.float8_e4m3fn) for item in codes])


_CHOOSE = {"max": _max_scale, "four-over-six": _four_over_six, "mse": _mse}


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[..., N, K] values; `global_` is [..., P], each for N / P consecutive rows.

    E2M1 times E4M3 is exact in float32, so there is one rounding, in the product with the global.
    """
    values = e2m1.decode_packed(packed)
    values *= expand(scale.to(torch.float32), NVFP4_GROUP, values.shape[-1])
    rows = values.shape[-2]
    factor = global_.repeat_interleave(rows // global_.shape[-1], dim=-1)
    return (values * factor[..., None]).to(dtype)
