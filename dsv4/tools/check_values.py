"""The checks that read tensors, one matrix at a time to bound memory."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from dsv4.checkpoint.assemble import (
    read_matrix,
    refuse_nan_codes,
    refuse_nonfinite,
    table_out_of_range,
    table_repeats,
)
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.checkpoint.findings import Finding
from dsv4.checkpoint.manifest import Manifest
from dsv4.checkpoint.sources import Source
from dsv4.checkpoint.stored_matrix import StoredMatrix
from dsv4.errors import CheckpointError
from dsv4.formats import e2m1, e8m0
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, StoredWeight
from dsv4.util.progress import Progress

# A weight with K inputs has an RMS near 1/sqrt(K); trained ones stay within this factor of their
# siblings in other layers, and all linears of a model within a larger one.
SIBLING_FACTOR = 16.0
ABSOLUTE_FACTOR = 8.0
# without other linears to compare with; the known mistakes are factors of 30 and more
LONE_FACTOR = 16.0
ZERO_SHARE = 0.05  # of a matrix's blocks


@dataclass(frozen=True)
class Size:
    """The magnitude of one stored matrix."""

    source: Source
    stored: StoredMatrix
    gain: float  # RMS times sqrt(K): about 1 for an ordinary linear layer
    global_: float | None = None
    input_scale: float | None = None


def check_values(manifest: Manifest, progress: Progress | None) -> list[Finding]:
    files = TensorFiles()
    findings: list[Finding] = []
    sizes: list[Size] = []
    total = sum(source.nbytes for source in manifest.sources.values())
    done = 0
    chosen = sorted(
        manifest.sources.values(), key=lambda s: (str(s.stored.data.file), s.stored.data.start)
    )
    for source in chosen:
        for matrix in source.matrices:
            _check_matrix(source, matrix.stored, files, findings, sizes)
            done += sum(info.nbytes for info in matrix.stored.tensors)
            if progress is not None:
                progress(done, total)
    findings += _magnitudes(sizes)
    findings += _uncalibrated(sizes)
    return findings


def _finding(check: str, message: str, stored: StoredMatrix, cause: str | None = None) -> Finding:
    return Finding("error", check, message, stored.data.name, stored.data.file.name, cause)


def _check_matrix(
    source: Source,
    stored: StoredMatrix,
    files: TensorFiles,
    findings: list[Finding],
    sizes: list[Size],
) -> None:
    if source.parameter.kind == "table":
        table = files.tensor(stored.data).to(torch.int64)
        problems = [table_out_of_range(table, source.parameter.limit), table_repeats(table)]
        findings += [_finding("table", text, stored) for text in problems if text]
        return
    try:
        weight = read_matrix(stored, files)
    except CheckpointError as error:
        check = "global" if "global" in str(error) or "positive number" in str(error) else "scale"
        text = str(error).removeprefix(f"{stored.data.file}: ")
        findings.append(_finding(check, text, stored, _global_cause(check, text)))
        return
    try:
        if isinstance(weight, Fp8BlockTensor):
            refuse_nan_codes(weight.data, stored.data)
        elif isinstance(weight, torch.Tensor):
            refuse_nonfinite(weight, stored.data)
    except CheckpointError as error:
        text = str(error).removeprefix(f"{stored.data.file}: ")
        findings.append(_finding("nan", text, stored))
        return
    input_scale = _input_scale(stored, files, findings)
    if source.parameter.kind != "linear":
        return
    energy, zero_blocks = _energy(weight)
    count = weight.shape.numel()
    if zero_blocks > ZERO_SHARE:
        findings.append(
            _finding(
                "zero",
                f"{zero_blocks:.0%} of the blocks hold zeros only, expected hardly any",
                stored,
                "the file was cut off or written sparsely",
            )
        )
    gain = (energy / max(count, 1) * weight.shape[-1]) ** 0.5
    global_ = float(weight.global_scale[0]) if isinstance(weight, Nvfp4Tensor) else None
    sizes.append(Size(source, stored, gain, global_, input_scale))


def _global_cause(check: str, text: str) -> str | None:
    if check == "global" and "inverted" in text:
        return "the global scale is inverted (ModelOpt multiplies, compressed-tensors divides)"
    return None


def _input_scale(stored: StoredMatrix, files: TensorFiles, findings: list[Finding]) -> float | None:
    info = stored.input_scale
    if info is None:
        return None
    value = float(files.tensor(info).reshape(-1)[0])
    if not (0 < value < float("inf")):
        message = f"activation scale {info.name} is {value}, expected a positive number"
        findings.append(_finding("input", message, stored))
        return None
    return 1 / value if stored.global_divides else value


def _energy(weight: StoredWeight) -> tuple[float, float]:
    """Sum of squares, and the share of all-zero blocks."""
    total, zero, count = 0.0, 0, 0
    for part in _chunks(weight):
        total += float(part.to(torch.float64).square().sum())
        zero += int((part == 0).sum())
        count += part.numel()
    return total, zero / max(count, 1)


def _chunks(weight: StoredWeight) -> Iterator[torch.Tensor]:
    """One number per block, the root of its sum of squares; a few megabytes at a time."""
    if isinstance(weight, torch.Tensor):
        rows = weight.reshape(-1, weight.shape[-1])
        for part in torch.split(rows, 2048):
            yield _block_norms(part.float())
        return
    if isinstance(weight, Fp8BlockTensor):
        step = max(2048 // weight.tile[0], 1) * weight.tile[0]  # whole tiles
        for start in range(0, weight.shape[0], step):
            stop = min(start + step, weight.shape[0])
            yield _block_norms(weight.row_range(start, stop).dequantize())
        return
    yield from _packed_chunks(weight)


def _block_norms(values: torch.Tensor) -> torch.Tensor:
    width = 16 if values.shape[-1] % 16 == 0 else values.shape[-1]
    blocks = values.reshape(values.shape[0], -1, width)
    norms: torch.Tensor = torch.linalg.vector_norm(blocks, dim=-1)
    return norms


def _packed_chunks(weight: Nvfp4Tensor | Mxfp4Tensor) -> Iterator[torch.Tensor]:
    """The same via a byte lookup table, without unpacking."""
    byte = torch.arange(256, dtype=torch.uint8)[:, None]
    table = e2m1.decode_packed(byte).square().sum(dim=-1)
    for start in range(0, weight.shape[0], 2048):
        packed, scale = weight.packed[start : start + 2048], weight.scale[start : start + 2048]
        if isinstance(weight, Nvfp4Tensor):
            factor = scale.float() * weight.global_scale[0]
        else:
            factor = e8m0.decode(scale)
        squares = table[packed.to(torch.int32)].reshape(*scale.shape, -1).sum(dim=-1)
        yield squares.sqrt() * factor


def _magnitudes(sizes: list[Size]) -> list[Finding]:
    """Compare each matrix with its siblings in other layers and experts, and each kind with the
    model's other linears."""
    kinds: dict[str, list[Size]] = defaultdict(list)
    for size in sizes:
        if size.gain > 0:
            kinds[_kind(size.source)].append(size)
    # the index weights have one row per head and their own magnitude
    trusted = [
        s.gain
        for s in sizes
        if s.gain > 0 and s.global_ is None and ".weights_proj." not in s.source.name
    ]
    findings = []
    for kind, group in kinds.items():
        middle = median(size.gain for size in group)
        nvfp4 = group[0].global_ is not None
        reference = median(trusted) if nvfp4 and trusted else 1.0
        factor = ABSOLUTE_FACTOR if trusted else LONE_FACTOR
        if not 1 / factor < middle / reference < factor and (nvfp4 or not 1e-3 < middle < 1e3):
            findings.append(_implausible(kind, group, middle, reference))
            continue
        findings += [
            _outlier(size, middle, group)
            for size in group
            if not 1 / SIBLING_FACTOR < size.gain / middle < SIBLING_FACTOR
        ]
    return findings


def _kind(source: Source) -> str:
    return source.name.split(".", 2)[-1] if source.layer is not None else source.name


def _implausible(kind: str, group: list[Size], middle: float, reference: float) -> Finding:
    typical = min(group, key=lambda size: abs(size.gain - middle))
    size = "small" if middle < reference else "large"
    message = (
        f"all {len(group)} matrices of {kind} are implausibly {size}: RMS x sqrt(K) is "
        f"{middle:.2g}, expected about {reference:.2g}"
    )
    return _finding("magnitude", message, typical.stored, _cause(typical, reference))


def _outlier(size: Size, middle: float, group: list[Size]) -> Finding:
    message = (
        f"RMS x sqrt(K) is {size.gain:.2g}, its {len(group) - 1} siblings in other layers and "
        f"experts have {middle:.2g}"
    )
    return _finding("magnitude", message, size.stored, _cause(size, middle))


def _cause(size: Size, expected: float) -> str | None:
    """The known mistake that best explains this magnitude."""
    if size.global_ is None:
        return None
    name = "weight_global_scale" if size.stored.global_divides else "weight_scale_2"
    ratio = size.gain / expected
    if size.global_ == 1.0 and ratio > 1:
        return f"{name} was left out or replaced by 1"
    if ratio < 1 and size.input_scale is not None:
        mended = ratio / size.input_scale
        if 1 / ABSOLUTE_FACTOR < mended < ABSOLUTE_FACTOR:
            return f"{name} was multiplied by input_scale, which belongs to the activation"
    if ratio > 1:
        return f"{name} is too large, as if it were inverted or left out"
    return f"{name} is too small, as if another factor had been multiplied in"


def _uncalibrated(sizes: list[Size]) -> list[Finding]:
    scales = [size.input_scale for size in sizes if size.input_scale is not None]
    if scales and all(scale == 1.0 for scale in scales):
        message = "every input_scale is 1.0: the activations were never calibrated (harmless)"
        return [Finding("note", "input", message)]
    return []
