"""Converts a checkpoint's weights to the layouts that kernels read, once, at load."""

from dataclasses import replace

from torch import Tensor

from dsv4.formats import mxfp4
from dsv4.formats.quantized import Mxfp4Tensor, Nvfp4Tensor, RepackedTensor, UnpackedTensor, Weight
from dsv4.ops.core.gpu import describe
from dsv4.ops.core.op import warn_unless_strict
from dsv4.ops.gemm.weights.a8 import a8_weight
from dsv4.ops.gemm.weights.scaled import scaled_weight
from dsv4.ops.gemm.weights.tiled import TiledFp4, stacked, tile_mxfp4, tile_nvfp4

_PAIRED_NAMES = (".w13",)


def stays_mxfp4(name: str) -> bool:
    """Whether kernels read it as MXFP4: experts, routed or shared; linear ops read NVFP4."""
    return "experts." in name


def repack(name: str, weight: Weight) -> Weight:
    """The weight `name` (canonical) as kernels read it; formats they read as stored stay."""
    if isinstance(weight, TiledFp4 | RepackedTensor):
        return weight
    paired = name.endswith(_PAIRED_NAMES)
    weight = _for_few_bits(name, weight, paired=paired)
    if isinstance(weight, Mxfp4Tensor) and stays_mxfp4(name):
        return tile_mxfp4(weight, paired=paired)
    if isinstance(weight, Mxfp4Tensor):
        weight = mxfp4_as_nvfp4(weight)
    if isinstance(weight, Nvfp4Tensor):
        return tile_nvfp4(weight, paired=paired)
    return weight


def _for_few_bits(name: str, weight: Weight, *, paired: bool) -> Weight:
    """The weight for products with rounded rows, if it asks for them and they are exact."""
    if isinstance(weight, Tensor | UnpackedTensor | RepackedTensor):
        return weight
    if weight.activations == "a16":
        return weight
    found: RepackedTensor | str
    if describe(weight.device).scales_blocks:
        if isinstance(weight, Mxfp4Tensor) and weight.activations == "a4":
            weight = mxfp4_as_nvfp4(weight)
        found = scaled_weight(weight)
    else:
        found = a8_weight(weight, paired=paired and stays_mxfp4(name))
    if not isinstance(found, str):
        return found
    # a model has hundreds of weights, but few reasons
    warn_unless_strict(f"{name} and others like it: activations stay a16: {found}", about=found)
    return replace(weight, activations="a16")


def mxfp4_as_nvfp4(weight: Mxfp4Tensor) -> Nvfp4Tensor:
    """The pinned cast (exact where a matrix's block exponents spread by at most 17)."""
    if weight.packed.dim() > 2:
        return stacked(mxfp4_as_nvfp4(weight[i]) for i in range(len(weight.packed)))
    packed, scale, global_, _ = mxfp4.to_nvfp4(weight.packed, weight.scale)
    return Nvfp4Tensor(packed, scale, global_.reshape(1), activations=weight.activations)
