"""Rounding in the forward pass, nothing in the backward pass (straight through).

The same numbers the engine computes with: NVFP4 weights, FP8 keys, FP4 index vectors. The
functions here work on stacks of matrices and never wait for the device.
"""

import torch
from torch import Tensor

from dsv4.formats import e2m1, e8m0, fp4, fp8
from dsv4.formats.entry import INDEX_GROUP, KV_GROUP
from dsv4.formats.nvfp4 import global_scale
from dsv4.formats.spec import E2M1_MAX, E4M3_MAX, NVFP4_GROUP
from dsv4.ops.kv.pool import hadamard


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


@torch.no_grad()
def nvfp4_values(w: Tensor) -> Tensor:
    """`[..., N, K]` with one global scale per matrix: what `formats.nvfp4` would give back."""
    w = w.detach().float()
    amax = w.abs().amax(dim=(-2, -1), keepdim=True)
    scale_2 = global_scale(amax)[..., None]
    blocks = w.unflatten(-1, (-1, NVFP4_GROUP)) / scale_2
    scale = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    rounded = e2m1.round_to(blocks / scale) * scale * scale_2
    return rounded.flatten(-2)


def nvfp4(w: Tensor) -> Tensor:
    return straight_through(w, nvfp4_values(w).to(w.dtype))


def kv_round(x: Tensor, rope_dim: int) -> Tensor:
    """A window or compressed key: channels without rotation pass through FP8."""
    with torch.no_grad():
        nope = x[..., :-rope_dim].float()
        data, scale = fp8.quantize_groups(nope, KV_GROUP, check=False)
        rounded = fp8.dequantize_groups(data, scale, KV_GROUP).to(x.dtype)
        rounded = torch.cat((rounded, x[..., -rope_dim:]), dim=-1)
    return straight_through(x, rounded)


def index_round(x: Tensor) -> Tensor:
    """An index query or key: Hadamard rotation, then FP4."""
    turned = hadamard(x)
    with torch.no_grad():
        groups = turned.float().unflatten(-1, (-1, INDEX_GROUP))
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=fp4.AMAX_FLOOR)
        scale = e8m0.decode(e8m0.from_exponent(e8m0.ceil_exponent(amax, E2M1_MAX)))
        rounded = (e2m1.round_to(groups / scale) * scale).flatten(-2).to(x.dtype)
    return straight_through(turned, rounded)
