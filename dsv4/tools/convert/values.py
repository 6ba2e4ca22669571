"""The values of a conversion: reads a unit of matrices, converts it and compares the result."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.checkpoint.assemble import read_matrix, refuse_nan_codes
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.errors import CheckpointError, KernelError
from dsv4.formats import e8m0, fp8, mxfp4, nvfp4
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, StoredWeight
from dsv4.formats.spec import FP8_BLOCK, MXFP4_GROUP, NVFP4_EXACT_SPREAD
from dsv4.tools.convert.units import Matrix, Unit

_CHUNK_ELEMENTS = 1 << 22  # elements dequantised at a time: a few dozen megabytes of workspace


@dataclass
class CastStats:
    """The error of new values against old ones, as sums, so groups can be added."""

    elements: int = 0
    reference: float = 0.0  # sum of old^2
    error: float = 0.0  # sum of (new - old)^2
    dot: float = 0.0
    output: float = 0.0  # sum of new^2
    matrices: int = 0
    exact: int = 0  # matrices without any difference
    uncalibrated: int = 0  # matrices without an input_scale; 1.0 was written

    def add(self, other: "CastStats") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def relative_rms(self) -> float:
        return (self.error / self.reference) ** 0.5 if self.reference else 0.0

    @property
    def cosine(self) -> float:
        size = (self.reference * self.output) ** 0.5
        return self.dot / size if size else 1.0

    def compare(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Add one range of values; True if unchanged. Sums are in float64."""
        self.elements += old.numel()
        same = bool(torch.equal(old, new))
        a, b = old.to(torch.float64), new.to(torch.float64)
        self.reference += float(a.square().sum())
        self.error += 0.0 if same else float((b - a).square().sum())
        self.dot += float((a * b).sum())
        self.output += float(b.square().sum())
        return same


def produce(
    unit: Unit, files: TensorFiles, choice: nvfp4.ScaleChoice
) -> tuple[list[torch.Tensor], CastStats]:
    """The bytes of `unit.tensors()` in their order, and how they compare with the source."""
    weights = [read_matrix(matrix.stored, files) for matrix in unit.matrices]
    stats = CastStats(matrices=len(weights))
    try:
        if unit.format == "keep":
            pairs = zip(unit.matrices, weights, strict=True)
            out = [tensor for m, w in pairs for tensor in _keep(m, w, files)]
            stats.exact = len(weights)
            stats.elements = sum(weight.shape.numel() for weight in weights)
            if unit.matrices[0].stored.format == "nvfp4":
                stats.uncalibrated = sum(m.stored.input_scale is None for m in unit.matrices)
            return out, stats
        if unit.format == "nvfp4":
            return _to_nvfp4(unit, weights, files, choice, stats), stats
        make = {"mxfp4": _to_mxfp4, "fp8": _to_fp8, "bf16": _to_bf16}[unit.format]
        return [t for weight in weights for t in make(weight, stats)], stats
    except KernelError as error:
        info = unit.matrices[0].stored.data
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: {error}") from error


def _rows(weight: StoredWeight) -> Iterator[tuple[slice, torch.Tensor]]:
    """float32 values, a few rows at a time; whole FP8 tiles."""
    rows, cols = weight.shape[-2:]
    step = max(_CHUNK_ELEMENTS // max(cols, 1) // FP8_BLOCK, 1) * FP8_BLOCK
    for start in range(0, rows, step):
        span = slice(start, min(start + step, rows))
        if isinstance(weight, torch.Tensor):
            values = weight[span].to(torch.float32)
        else:
            values = weight.row_range(span.start, span.stop).dequantize()
        _refuse_nonfinite(values)
        yield span, values


def _refuse_nonfinite(values: torch.Tensor) -> None:
    # a finite sum proves that all are finite; an infinite one may be overflow
    total = values.sum()
    if not bool(torch.isfinite(total)) and not bool(torch.isfinite(values).all()):
        raise KernelError("found NaN or Inf, expected finite values; fetch the source again")


def _keep(matrix: Matrix, weight: StoredWeight, files: TensorFiles) -> list[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        for part in torch.tensor_split(weight.reshape(-1), -(-weight.numel() // _CHUNK_ELEMENTS)):
            if part.is_floating_point():
                _refuse_nonfinite(part)
        return [weight]
    if isinstance(weight, Nvfp4Tensor):
        return [weight.packed, weight.scale, weight.global_scale, _input_scale(matrix, files)]
    if isinstance(weight, Mxfp4Tensor):
        return [weight.packed, weight.scale]
    refuse_nan_codes(weight.data, matrix.stored.data)
    return [weight.data, weight.scale]


def _input_scale(matrix: Matrix, files: TensorFiles) -> torch.Tensor:
    """The source's activation scale, as a multiplier; 1 where it has none (safe, 1.4)."""
    info = matrix.stored.input_scale
    if info is None:
        return torch.ones(1)
    value = files.tensor(info).reshape(1).to(torch.float64)
    return (1 / value if matrix.stored.global_divides else value).to(torch.float32)


def _to_nvfp4(
    unit: Unit,
    weights: list[StoredWeight],
    files: TensorFiles,
    choice: nvfp4.ScaleChoice,
    stats: CastStats,
) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    shared = _shared_global(weights, choice)
    top = _shared_exponent(weights)
    for matrix, weight in zip(unit.matrices, weights, strict=True):
        if isinstance(weight, Mxfp4Tensor):
            packed, scale, global_, report = mxfp4.to_nvfp4(weight.packed, weight.scale, top)
            new = Nvfp4Tensor(packed, scale, global_.reshape(1))
            pinned = report.exact and packed.data_ptr() == weight.packed.data_ptr()
        else:
            new, pinned = _quantize(weight, choice, shared), False
        if pinned and _same_scales(weight, new):
            stats.exact += 1
            stats.elements += weight.shape.numel()
        else:
            _compare(weight, new, stats)
        stats.uncalibrated += matrix.stored.input_scale is None
        out += [new.packed, new.scale, new.global_scale, _input_scale(matrix, files)]
    return out


def _same_scales(old: StoredWeight, new: Nvfp4Tensor) -> bool:
    """With the same nibbles, equal scales prove equal values without unpacking."""
    assert isinstance(old, Mxfp4Tensor)
    wanted = e8m0.decode(old.scale).repeat_interleave(2, dim=-1)
    return bool(torch.equal(new.scale.float() * new.global_scale, wanted))


def _shared_global(weights: list[StoredWeight], choice: nvfp4.ScaleChoice) -> torch.Tensor:
    """One global for matrices that share a kernel call (w1 and w3)."""
    if isinstance(weights[0], Mxfp4Tensor):
        return torch.ones(())
    amax = torch.zeros(())
    for weight in weights:
        for _, values in _rows(weight):
            amax = torch.maximum(amax, values.abs().amax())
    return nvfp4.global_scale(amax, choice)


def _shared_exponent(weights: list[StoredWeight]) -> int | None:
    """The largest scale byte, if every block is inside the window below it."""
    scales = [weight.scale for weight in weights if isinstance(weight, Mxfp4Tensor)]
    if not scales:
        return None
    largest = max(int(scale.max()) for scale in scales)
    smallest = min(int(scale.min()) for scale in scales)
    return largest if largest - smallest <= NVFP4_EXACT_SPREAD else None


def _quantize(
    weight: StoredWeight, choice: nvfp4.ScaleChoice, global_: torch.Tensor
) -> Nvfp4Tensor:
    rows, cols = weight.shape[-2:]
    packed = torch.empty((rows, cols // 2), dtype=torch.uint8)
    scale = torch.empty((rows, cols // 16), dtype=torch.float8_e4m3fn)
    for span, values in _rows(weight):
        packed[span], scale[span], _ = nvfp4.quantize(values, choice, global_=global_)
    return Nvfp4Tensor(packed, scale, global_.reshape(1))


def _to_mxfp4(weight: StoredWeight, stats: CastStats) -> list[torch.Tensor]:
    rows, cols = weight.shape[-2:]
    packed = torch.empty((rows, cols // 2), dtype=torch.uint8)
    scale = torch.empty((rows, cols // MXFP4_GROUP), dtype=torch.uint8)
    for span, values in _rows(weight):
        packed[span], scale[span] = mxfp4.quantize(values)
    _compare(weight, Mxfp4Tensor(packed, scale), stats)
    return [packed, scale]


def _to_fp8(weight: StoredWeight, stats: CastStats) -> list[torch.Tensor]:
    rows, cols = weight.shape[-2:]
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    data = torch.empty((rows, cols), dtype=torch.float8_e4m3fn)
    scale = torch.empty(grid, dtype=torch.uint8)
    for span, values in _rows(weight):
        tiles = slice(span.start // FP8_BLOCK, -(-span.stop // FP8_BLOCK))
        if isinstance(weight, Mxfp4Tensor):
            part = weight.row_range(span.start, span.stop)
            data[span], scale[tiles], _ = mxfp4.to_fp8_tiles(part.packed, part.scale, FP8_BLOCK)
        else:
            data[span], scale[tiles] = fp8.quantize_tiles(values, FP8_BLOCK)
    _compare(weight, Fp8BlockTensor(data, scale, FP8_BLOCK), stats)
    return [data, scale]


def _to_bf16(weight: StoredWeight, stats: CastStats) -> list[torch.Tensor]:
    out = torch.empty(tuple(weight.shape), dtype=torch.bfloat16)
    for span, values in _rows(weight):
        out[span] = values.to(torch.bfloat16)
    _compare(weight, out, stats)
    return [out]


def _compare(old: StoredWeight, new: StoredWeight, stats: CastStats) -> None:
    """Compare old and new values as readers see them, a few rows at a time."""
    same = True
    for (_, a), (_, b) in zip(_rows(old), _rows(new), strict=True):
        same &= stats.compare(a, b)
    stats.exact += same
