"""How one matrix is stored, decided from the tensors beside it. No torch.

    suffixes                                       weight dtype    format
    weight, scale [N, K/32]                        I8 / U8 / F4    MXFP4
    weight, scale / weight_scale(_inv) per tile    F8_E4M3         FP8 tiles
    weight, weight_scale, weight_scale_2           U8              NVFP4, global multiplies
    weight_packed, weight_scale, weight_global_scale  U8           NVFP4, global divides
    weight                                         BF16/F16/F32    plain

`input_scale` and `input_global_scale` belong to the activation and never enter the weight.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.findings import Finding
from dsv4.formats.spec import MXFP4_GROUP, NVFP4_GROUP

StoredFormat = Literal["plain", "fp8", "mxfp4", "nvfp4"]
PLAIN_DTYPES = ("BF16", "F16", "F32")
_SCALAR = ((), (1,))


@dataclass(frozen=True)
class Stored:
    """One matrix on disk: its format and the tensors that make it up."""

    format: StoredFormat
    data: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    global_divides: bool = False  # compressed-tensors stores 1 / global
    block: int = 0  # FP8 tile
    input_scale: TensorInfo | None = None  # the activation's, not used for the weight

    @property
    def tensors(self) -> list[TensorInfo]:
        parts = (self.data, self.scale, self.global_scale)
        return [info for info in parts if info is not None]

    @property
    def label(self) -> str:
        """For people: bf16, fp32, fp8, mxfp4, nvfp4."""
        if self.format != "plain":
            return self.format
        return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(
            self.data.dtype, self.data.dtype.lower()
        )


class _Refusal(Exception):
    def __init__(self, info: TensorInfo, check: str, message: str, cause: str | None = None):
        super().__init__(message)
        self.finding = Finding("error", check, message, info.name, info.file.name, cause)


def detect(
    found: dict[str, TensorInfo], shape: tuple[int, ...], block: int, *, may_quantize: bool = True
) -> Stored | Finding:
    """The matrix of logical `shape` stored as `found` (suffix -> tensor), or what is wrong."""
    try:
        return _detect(dict(found), shape, block, may_quantize)
    except _Refusal as refusal:
        return refusal.finding


def _detect(
    found: dict[str, TensorInfo], shape: tuple[int, ...], block: int, may_quantize: bool
) -> Stored:
    input_scale = found.pop("input_scale", None) or found.pop("input_global_scale", None)
    suffixes = frozenset(found)
    if suffixes == {"weight"}:
        return _plain(found["weight"], shape, may_quantize)
    some = next(iter(found.values()), None)
    if some is None:
        assert input_scale is not None
        raise _Refusal(input_scale, "pairing", "an activation scale without its weight")
    if not may_quantize:
        extra = next(info for suffix, info in found.items() if suffix != "weight")
        raise _Refusal(
            extra,
            "format",
            "this tensor is never quantised in DeepSeek-V4, found a scale beside it",
            "the converter treated the router, head or a norm as a linear layer",
        )
    if "weight_packed" in found:
        return _nvfp4(found, shape, "weight_packed", "weight_global_scale", input_scale)
    weight = found.get("weight")
    if weight is None:
        raise _Refusal(some, "pairing", "a scale without its weight; expected `weight` beside it")
    if suffixes == {"weight", "scale"} and weight.dtype in ("I8", "U8", "F4"):
        return _mxfp4(weight, found["scale"], shape)
    if weight.dtype == "F8_E4M3":
        return _fp8(found, shape, block, input_scale)
    if "weight_scale" in found and weight.dtype in ("U8", "I8", "F4"):
        return _nvfp4(found, shape, "weight", "weight_scale_2", input_scale)
    beside = ", ".join(sorted(suffixes - {"weight"}))
    raise _Refusal(
        weight, "format", f"dtype {weight.dtype} beside {beside} is no format known here"
    )


def _plain(info: TensorInfo, shape: tuple[int, ...], may_quantize: bool) -> Stored:
    if info.dtype in ("U8", "I8", "F4", "F8_E4M3") and may_quantize:
        raise _Refusal(
            info,
            "pairing",
            f"quantised weight ({info.dtype}) without its scale",
            "the scale tensors were dropped when the file was made",
        )
    if info.dtype not in PLAIN_DTYPES:
        raise _Refusal(info, "dtype", f"dtype {info.dtype}, expected {', '.join(PLAIN_DTYPES)}")
    _expect(info, shape, "plain")
    return Stored("plain", info)


def _mxfp4(weight: TensorInfo, scale: TensorInfo, shape: tuple[int, ...]) -> Stored:
    rows, cols = shape
    if cols % MXFP4_GROUP:
        raise _Refusal(weight, "shape", f"MXFP4 with K = {cols}, expected a multiple of 32")
    _expect(weight, _packed(weight, rows, cols), "MXFP4")
    _dtype(scale, ("F8_E8M0", "U8"), "an MXFP4 scale")
    _expect(scale, (rows, cols // MXFP4_GROUP), "MXFP4 scale")
    return Stored("mxfp4", weight, scale)


def _nvfp4(
    found: dict[str, TensorInfo],
    shape: tuple[int, ...],
    weight_name: str,
    global_name: str,
    input_scale: TensorInfo | None,
) -> Stored:
    weight = found.pop(weight_name)
    scale, global_ = found.pop("weight_scale", None), found.pop(global_name, None)
    if scale is None:
        raise _Refusal(weight, "pairing", "NVFP4 weight without weight_scale")
    if global_ is None:
        raise _Refusal(
            weight,
            "pairing",
            f"NVFP4 weight without {global_name}; expected weight, scale and global",
            f"{global_name} was dropped; values would be off by a factor of about 2.6e4",
        )
    if found:
        extra = next(iter(found.values()))
        raise _Refusal(extra, "pairing", "does not belong beside an NVFP4 weight")
    rows, cols = shape
    if cols % NVFP4_GROUP:
        raise _Refusal(weight, "shape", f"NVFP4 with K = {cols}, expected a multiple of 16")
    _dtype(weight, ("U8", "I8", "F4"), "an NVFP4 weight")
    _expect(weight, _packed(weight, rows, cols), "NVFP4")
    _dtype(scale, ("F8_E4M3",), "an NVFP4 block scale")
    _expect(scale, (rows, cols // NVFP4_GROUP), "NVFP4 scale")
    _dtype(global_, ("F32",), "an NVFP4 global scale")
    for info in (global_, input_scale):
        if info is not None and info.shape not in _SCALAR:
            raise _Refusal(info, "shape", f"shape {list(info.shape)}, expected one number")
    divides = global_name == "weight_global_scale"
    return Stored("nvfp4", weight, scale, global_, divides, input_scale=input_scale)


def _fp8(
    found: dict[str, TensorInfo],
    shape: tuple[int, ...],
    block: int,
    input_scale: TensorInfo | None,
) -> Stored:
    weight = found.pop("weight")
    names = [name for name in ("scale", "weight_scale", "weight_scale_inv") if name in found]
    if len(found) != 1 or len(names) != 1:
        beside = ", ".join(sorted(found)) or "nothing"
        raise _Refusal(weight, "pairing", f"FP8 weight beside {beside}, expected one tile scale")
    scale = found[names[0]]
    _expect(weight, shape, "FP8")
    _dtype(scale, ("F8_E8M0", "U8", "F32", "BF16"), "an FP8 tile scale")
    grid = tuple(ceil(n / block) for n in shape)
    if scale.shape != grid:
        fits = [b for b in (128, 64, 32, 16) if tuple(ceil(n / b) for n in shape) == scale.shape]
        cause = f"tiles of {fits[0]}, but weight_block_size says {block}" if fits else None
        _expect(scale, grid, f"FP8 scale ({block} x {block} tiles)", cause)
    return Stored("fp8", weight, scale, block=block, input_scale=input_scale)


def _packed(info: TensorInfo, rows: int, cols: int) -> tuple[int, int]:
    return (rows, cols) if info.dtype == "F4" else (rows, cols // 2)


def _dtype(info: TensorInfo, allowed: tuple[str, ...], what: str) -> None:
    if info.dtype not in allowed:
        expected = " or ".join(allowed)
        raise _Refusal(info, "dtype", f"dtype {info.dtype} for {what}, expected {expected}")


def _expect(info: TensorInfo, shape: tuple[int, ...], what: str, cause: str | None = None) -> None:
    if info.shape == shape:
        return
    if cause is None and len(shape) == 2 and info.shape == shape[::-1]:
        cause = "N and K are swapped (the tensor is transposed)"
    if cause is None and len(info.shape) == len(shape) == 2 and info.shape[0] == shape[1]:
        cause = "N and K are swapped, sized from the packed shape"
    raise _Refusal(info, "shape", f"{what} shape {list(info.shape)}, expected {list(shape)}", cause)
