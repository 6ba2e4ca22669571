"""FP4 with power-of-two scales: E2M1 elements, one E8M0 byte per group of the last axis.

With groups of 32 along K this is MXFP4, the format of the official routed experts and of the
index keys.
"""

import torch

from dsv4.formats import e2m1, e8m0
from dsv4.formats.groups import expand, grouped_amax, refuse_nonfinite
from dsv4.formats.spec import E2M1_MAX

AMAX_FLOOR = E2M1_MAX * 2.0**-126  # keeps the exponent at -126 or above for a zero group


def quantize_groups(
    x: torch.Tensor, group: int, *, check: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes [..., C/2] and E8M0 scale bytes [..., ceil(C / group)].

    The scale is the smallest power of two that does not clip: 2^ceil(log2(amax / 6)).
    `check=False` skips the search for NaN and Inf (a device synchronisation). E2M1 has neither, so
    such a group has the scale NaN.
    """
    x = x.to(torch.float32)
    if check:
        refuse_nonfinite(x, "FP4 groups")
    amax = grouped_amax(x, group).clamp(min=AMAX_FLOOR)
    exponent = e8m0.ceil_exponent(amax, E2M1_MAX)
    inverse = e8m0.decode(e8m0.from_exponent(-exponent))
    code = e2m1.encode(x * expand(inverse, group, x.shape[-1]))
    scale = e8m0.from_exponent(exponent)
    return e2m1.pack(code), scale.masked_fill_(~torch.isfinite(amax), e8m0.NAN)


def dequantize_groups(
    packed: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of `quantize_groups`."""
    values = e2m1.decode_packed(packed)
    return (values * expand(e8m0.decode(scale), group, values.shape[-1])).to(dtype)
