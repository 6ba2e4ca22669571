"""How one matrix is stored, inferred from its tensors. No torch.

    suffixes                                       weight dtype    format
    weight, scale [N, K/32]                        I8 / U8 / F4    MXFP4
    weight(_packed), weight_scale [N, K/32] bytes  U8              MXFP4
    weight, scale / weight_scale(_inv) per tile    F8_E4M3         FP8 tiles
    weight, weight_scale, weight_scale_2           U8              NVFP4, global multiplies
    weight_packed, weight_scale, weight_global_scale  U8           NVFP4, global divides
    weight                                         BF16/F16/F32    plain

An FP8 tile is a square of the declared size, a row or part of one, or the whole matrix: the shape
of the scales decides. `input_scale`, `input_global_scale` and `activation_scale` belong to the
activation and never affect the weight.
"""

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.findings import Finding
from dsv4.formats.spec import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP

StoredFormat = Literal["plain", "fp8", "mxfp4", "nvfp4"]
PLAIN_DTYPES = ("BF16", "F16", "F32")
E8M0_DTYPES = ("F8_E8M0", "U8")
ACTIVATION_SUFFIXES = ("input_scale", "input_global_scale", "activation_scale")
_SCALAR = ((), (1,))


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix on disk: its format and the tensors that make it up."""

    format: StoredFormat
    data: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    global_divides: bool = False  # compressed-tensors stores 1 / global
    tile: tuple[int, int] = (0, 0)  # FP8: (rows, columns) under one scale
    input_scale: TensorInfo | None = None  # the activation's, not used for the weight

    @property
    def tensors(self) -> list[TensorInfo]:
        parts = (self.data, self.scale, self.global_scale)
        return [info for info in parts if info is not None]

    @property
    def label(self) -> str:
        """Readable: bf16, fp32, fp8, mxfp4, nvfp4."""
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
) -> StoredMatrix | Finding:
    """The matrix of logical `shape` stored as `found` (suffix -> tensor), or what is wrong."""
    try:
        return _detect(dict(found), shape, block, may_quantize)
    except _Refusal as refusal:
        return refusal.finding


def _detect(
    found: dict[str, TensorInfo], shape: tuple[int, ...], block: int, may_quantize: bool
) -> StoredMatrix:
    activation = [found.pop(suffix) for suffix in ACTIVATION_SUFFIXES if suffix in found]
    input_scale = activation[0] if activation else None
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
        if _is_mxfp4(found, "weight_global_scale"):
            return _mxfp4(found["weight_packed"], found["weight_scale"], shape, input_scale)
        return _nvfp4(found, shape, "weight_packed", "weight_global_scale", input_scale)
    weight = found.get("weight")
    if weight is None:
        raise _Refusal(some, "pairing", "a scale without its weight; expected `weight` beside it")
    if suffixes == {"weight", "scale"} and weight.dtype in ("I8", "U8", "F4"):
        return _mxfp4(weight, found["scale"], shape, input_scale)
    if weight.dtype == "F8_E4M3":
        return _fp8(found, shape, block, input_scale)
    if "weight_scale" in found and weight.dtype in ("U8", "I8", "F4"):
        if _is_mxfp4(found, "weight_scale_2"):
            return _mxfp4(weight, found["weight_scale"], shape, input_scale)
        return _nvfp4(found, shape, "weight", "weight_scale_2", input_scale)
    beside = ", ".join(sorted(suffixes - {"weight"}))
    raise _Refusal(
        weight, "format", f"dtype {weight.dtype} beside {beside} is no format known here"
    )


def _plain(info: TensorInfo, shape: tuple[int, ...], may_quantize: bool) -> StoredMatrix:
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
    return StoredMatrix("plain", info)


def _is_mxfp4(found: dict[str, TensorInfo], global_name: str) -> bool:
    """ModelOpt and compressed-tensors write MXFP4 under NVFP4's names: exponent bytes as scales,
    and no global."""
    scale = found.get("weight_scale")
    exponents = scale is not None and scale.dtype in E8M0_DTYPES
    return exponents and len(found) == 2 and global_name not in found


def _mxfp4(
    weight: TensorInfo,
    scale: TensorInfo,
    shape: tuple[int, ...],
    input_scale: TensorInfo | None,
) -> StoredMatrix:
    rows, cols = shape
    if cols % MXFP4_GROUP:
        raise _Refusal(weight, "shape", f"MXFP4 with K = {cols}, expected a multiple of 32")
    _dtype(weight, ("U8", "I8", "F4"), "an MXFP4 weight")
    _expect(weight, _packed(weight, rows, cols), "MXFP4")
    _dtype(scale, E8M0_DTYPES, "an MXFP4 scale")
    _expect(scale, (rows, cols // MXFP4_GROUP), "MXFP4 scale")
    return StoredMatrix("mxfp4", weight, scale, input_scale=input_scale)


def _nvfp4(
    found: dict[str, TensorInfo],
    shape: tuple[int, ...],
    weight_name: str,
    global_name: str,
    input_scale: TensorInfo | None,
) -> StoredMatrix:
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
    return StoredMatrix("nvfp4", weight, scale, global_, divides, input_scale=input_scale)


def _fp8(
    found: dict[str, TensorInfo],
    shape: tuple[int, ...],
    block: int,
    input_scale: TensorInfo | None,
) -> StoredMatrix:
    weight = found.pop("weight")
    names = [name for name in ("scale", "weight_scale", "weight_scale_inv") if name in found]
    if len(found) != 1 or len(names) != 1:
        beside = ", ".join(sorted(found)) or "nothing"
        raise _Refusal(weight, "pairing", f"FP8 weight beside {beside}, expected one tile scale")
    scale = _as_matrix(found[names[0]], shape[0])
    _expect(weight, shape, "FP8")
    _dtype(scale, (*E8M0_DTYPES, "F32", "BF16"), "an FP8 tile scale")
    fitting = [tile for tile in _tiles(shape, block) if _grid(shape, tile) == scale.shape]
    if not fitting:
        fits = [b for b in (128, 64, 32, 16) if _grid(shape, (b, b)) == scale.shape]
        cause = f"tiles of {fits[0]}, but weight_block_size says {block}" if fits else None
        _expect(scale, _grid(shape, (block, block)), f"FP8 scale ({block} x {block} tiles)", cause)
    return StoredMatrix("fp8", weight, scale, tile=fitting[0], input_scale=input_scale)


def _tiles(shape: tuple[int, ...], block: int) -> list[tuple[int, int]]:
    """What one FP8 scale may cover: a square, a row, 32 or 128 columns of a row, or everything."""
    rows, cols = shape
    return [(block, block), (1, cols), (1, MXFP4_GROUP), (1, FP8_BLOCK), (rows, cols)]


def _grid(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, ...]:
    return tuple(ceil(n / t) for n, t in zip(shape, tile, strict=True))


def _as_matrix(scale: TensorInfo, rows: int) -> TensorInfo:
    """The same values as [R, C]: tools also write (), [1], [N] and [R, 1, C, 1]."""
    shape = scale.shape
    if prod(shape) == 1:
        return replace(scale, shape=(1, 1))
    if shape == (rows,):
        return replace(scale, shape=(rows, 1))
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return replace(scale, shape=(shape[0], shape[2]))
    return scale


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
