"""Builds one parameter from its stored matrices: checked, sliced, copied into its final buffer.

Stacked experts are never collected in a list: the final buffer is allocated first and each expert
is read into its slot, so the only extra memory is one matrix.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

import torch

from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.files.tensors import TensorFiles, empty
from dsv4.checkpoint.rank_slices import WeightSlice
from dsv4.checkpoint.sources import Source
from dsv4.checkpoint.stored_matrix import StoredMatrix
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, StoredWeight
from dsv4.formats.spec import E8M0_NAN

log = logging.getLogger(__name__)

Advance = Callable[[int], None]


def assemble(
    source: Source, files: TensorFiles, cut: WeightSlice, advance: Advance
) -> StoredWeight:
    """The parameter in its stored format, in its own memory."""
    if source.parameter.kind == "table":
        return _table(source, files, advance)
    if source.matrices[0].expert is None and source.num_parts == 1:
        return _single(source, files, cut, advance)
    return _stack(source, files, cut, advance)


def read_matrix(
    stored: StoredMatrix,
    files: TensorFiles,
    cut: WeightSlice | None = None,
    place: torch.Tensor | None = None,
) -> StoredWeight:
    """One matrix, or a slice of it. Scales are checked, plain tensors are not. Other ranks' rows
    are not read. The matrix itself is read into `place`, if it is like it."""
    cut = cut or WeightSlice()
    if stored.format == "plain":
        data = files.tensor(stored.data, cut.rows, place)
        return _cut(data, replace(cut, rows=None))
    assert stored.scale is not None
    rows, tiles, cut = _whole_tiles(stored, cut)
    data = files.tensor(stored.data, rows, place)
    scale = files.tensor(stored.scale, tiles)
    weight: StoredWeight
    if stored.format == "mxfp4":
        weight = _cut(Mxfp4Tensor(data, scale), cut)
        assert isinstance(weight, Mxfp4Tensor)
        _check_e8m0(weight.scale, stored.scale)
    elif stored.format == "fp8":
        scale = scale if scale.dtype == torch.uint8 else scale.to(torch.float32)
        weight = _cut(Fp8BlockTensor(data, scale, stored.tile[1], stored.tile[0]), cut)
        assert isinstance(weight, Fp8BlockTensor)
        _check_tile_scale(weight.scale, stored.scale)
    else:
        weight = _cut(Nvfp4Tensor(data, scale, _global(stored, files)), cut)
        assert isinstance(weight, Nvfp4Tensor)
        _check_block_scale(weight.scale, stored.scale)
    return weight


def _whole_tiles(
    stored: StoredMatrix, cut: WeightSlice
) -> tuple[range | None, range | None, WeightSlice]:
    """Rows of a quantised matrix and of its scales to read, and the slice that is then left."""
    if cut.rows is None:
        return None, None, cut
    height = stored.tile[0] if stored.format == "fp8" else 1
    first, stop = cut.rows.start // height, cut.rows.stop
    start = first * height
    left = replace(cut, rows=range(cut.rows.start - start, stop - start))
    return range(start, stop), range(first, -(-stop // height)), left


def _single(source: Source, files: TensorFiles, cut: WeightSlice, advance: Advance) -> StoredWeight:
    stored, nbytes = source.stored, cut.nbytes(source.matrices[0])
    weight = read_matrix(stored, files, cut)
    if isinstance(weight, torch.Tensor):
        weight = _own(weight)
        refuse_nonfinite(weight, stored.data)
        advance(nbytes)
        return weight
    whole = weight.map(_own)
    if isinstance(whole, Fp8BlockTensor):
        refuse_nan_codes(whole.data, stored.data)
    advance(nbytes)
    return whole


def _own(value: torch.Tensor) -> torch.Tensor:
    """Not a view into what was read beside it."""
    if value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes:
        return value
    return empty(tuple(value.shape), value.dtype).copy_(value)


def _stack(source: Source, files: TensorFiles, cut: WeightSlice, advance: Advance) -> StoredWeight:
    """Stack experts, w1 above w3; matrices are read in disk order."""
    num_parts = source.num_parts
    first_expert = cut.experts.start if cut.experts is not None else 0
    matrices = [matrix for matrix in source.matrices if cut.wants(matrix)]
    if not matrices:
        raise CheckpointError(f"{source.name}: no expert in {cut.experts}; ask for existing ones")
    has_experts = matrices[0].expert is not None
    buffers: list[torch.Tensor] = []
    globals_: dict[tuple[int, int], torch.Tensor] = {}
    tile = (0, 0)
    for matrix in sorted(matrices, key=lambda c: (str(c.stored.data.file), c.stored.data.start)):
        slot = (matrix.expert or 0) - (first_expert if has_experts else 0)
        rows = buffers[0].shape[1] // num_parts if buffers else 0
        place = buffers[0][slot, matrix.part * rows :][:rows] if buffers else None
        weight = read_matrix(matrix.stored, files, cut, place)
        if isinstance(weight, Fp8BlockTensor):
            weight = _align(weight, num_parts)
            tile = weight.tile
        if isinstance(weight, Nvfp4Tensor):
            globals_[slot, matrix.part] = weight.global_scale
        pieces = _pieces(weight)
        if not buffers:
            count = len(matrices) // num_parts
            buffers = [empty((count, num_parts * p.shape[0], p.shape[1]), p.dtype) for p in pieces]
        for buffer, piece in zip(buffers, pieces, strict=True):
            rows = piece.shape[0]
            place = buffer[slot, matrix.part * rows : (matrix.part + 1) * rows]
            if piece.data_ptr() != place.data_ptr():
                place.copy_(piece)
            if matrix.stored.format == "plain":
                refuse_nonfinite(place, matrix.stored.data)
            elif piece.dtype == torch.float8_e4m3fn and matrix.stored.format == "fp8":
                refuse_nan_codes(place, matrix.stored.data)
        advance(cut.nbytes(matrix))
    if not has_experts:
        buffers = [buffer[0] for buffer in buffers]
    return _join(source, buffers, globals_, tile, num_parts, has_experts)


def _align(weight: Fp8BlockTensor, num_parts: int) -> Fp8BlockTensor:
    """Smaller tiles where a joined half would not start on a tile edge (tiny models only)."""
    rows, (tile_rows, tile_cols) = weight.shape[0], weight.tile
    if num_parts == 1 or rows % tile_rows == 0:
        return weight
    return weight.refine(gcd(rows, tile_rows), tile_cols)


def _pieces(weight: StoredWeight) -> list[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        return [weight]
    if isinstance(weight, Fp8BlockTensor):
        return [weight.data, weight.scale]
    return [weight.packed, weight.scale]


def _join(
    source: Source,
    buffers: list[torch.Tensor],
    globals_: dict[tuple[int, int], torch.Tensor],
    tile: tuple[int, int],
    num_parts: int,
    has_experts: bool,
) -> StoredWeight:
    if source.format == "plain":
        return buffers[0]
    if source.format == "fp8":
        return Fp8BlockTensor(buffers[0], buffers[1], tile[1], tile[0])
    if source.format == "mxfp4":
        return Mxfp4Tensor(buffers[0], buffers[1])
    count = len(globals_) // num_parts
    table = torch.cat([globals_[e, p] for e in range(count) for p in range(num_parts)])
    table = table.reshape(count, num_parts)
    if bool((table == table[:, :1]).all()):
        table = table[:, :1].contiguous()  # both halves share one global
    return Nvfp4Tensor(buffers[0], buffers[1], table if has_experts else table[0])


def _cut(weight: StoredWeight, cut: WeightSlice) -> StoredWeight:
    if cut.rows is not None:
        start, stop = cut.rows.start, cut.rows.stop
        plain = isinstance(weight, torch.Tensor)
        weight = weight[start:stop] if plain else weight.row_range(start, stop)  # type: ignore[union-attr]
    if cut.columns is not None:
        start, stop = cut.columns.start, cut.columns.stop
        if isinstance(weight, torch.Tensor):
            return weight[..., start:stop]
        return weight.column_range(start, stop)
    return weight


# --- checks that are cheap compared with reading ------------------------------------------------

_CHUNK = 1 << 20  # elements


def refuse_nan_codes(data: torch.Tensor, info: TensorInfo) -> None:
    """E4M3 has two NaN codes: the largest signed and the largest unsigned byte."""
    for part in _pieces_of(data):
        if int(part.view(torch.int8).max()) == 0x7F or int(part.view(torch.uint8).max()) == 0xFF:
            where = torch.isnan(data.float()).nonzero()[0].tolist()
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}: found NaN at {where}, expected finite values; "
                "the file is damaged, fetch it again"
            )


def _pieces_of(data: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = data.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def refuse_nonfinite(data: torch.Tensor, info: TensorInfo) -> None:
    """A finite sum proves that all values are finite; an infinite one may be overflow and is
    checked element by element."""
    # torch sums BF16 in float32 anyway and is several times faster without a dtype; F16 overflows
    wide = torch.float32 if data.dtype == torch.float16 else None
    if all(bool(torch.isfinite(part.sum(dtype=wide))) for part in _pieces_of(data)):
        return
    finite = torch.isfinite(data)
    if not bool(finite.all()):
        where = tuple((~finite).nonzero()[0].tolist())
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found {float(data[where])} at {list(where)}, "
            "expected finite values; the file is damaged, fetch it again"
        )


def _table(source: Source, files: TensorFiles, advance: Advance) -> torch.Tensor:
    """The hash router's expert ids. An id out of range is refused; an expert named twice for a
    token only gives a warning, because fresh transformers models have all-zero tables."""
    info = source.stored.data
    table = files.tensor(info).to(torch.int64, copy=True)
    problem = table_out_of_range(table, source.parameter.limit)
    if problem:
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: {problem}")
    repeated = table_repeats(table)
    if repeated:
        log.warning("%s: tensor %r: %s", info.file, info.name, repeated)
    advance(info.nbytes)
    return table


def table_out_of_range(table: torch.Tensor, num_experts: int) -> str | None:
    bad = (table < 0) | (table >= num_experts)
    if not bool(bad.any()):
        return None
    token, column = bad.nonzero()[0].tolist()
    found = int(table[token, column])
    return f"found expert {found} for token {token}, expected 0 to {num_experts - 1}"


def table_repeats(table: torch.Tensor) -> str | None:
    ordered = table.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
    if not bool(twice.any()):
        return None
    token = int(twice.nonzero()[0])
    return (
        f"found an expert twice for {int(twice.sum())} tokens, first token {token} "
        f"({table[token].tolist()}), expected different experts"
    )


def _check_e8m0(scale: torch.Tensor, info: TensorInfo) -> None:
    if scale.numel() and int(scale.max()) == E8M0_NAN:
        where = (scale == E8M0_NAN).nonzero()[0].tolist()
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found E8M0 byte 255 (NaN) at {where}, expected "
            "0 to 254; the file is damaged, fetch it again"
        )


def _check_tile_scale(scale: torch.Tensor, info: TensorInfo) -> None:
    if scale.dtype == torch.uint8:
        _check_e8m0(scale, info)
    elif not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found a negative, NaN or infinite scale, "
            "expected positive numbers; the file is damaged"
        )


def _check_block_scale(scale: torch.Tensor, info: TensorInfo) -> None:
    """E4M3 block scales are positive: byte 0x7F is NaN, everything above has the sign bit."""
    if scale.numel() and int(scale.view(torch.uint8).max()) >= 0x7F:
        where = (scale.view(torch.uint8) >= 0x7F).nonzero()[0].tolist()
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found a negative or NaN block scale at {where}, "
            "expected positive E4M3; the bytes are damaged or were converted instead of copied"
        )


def _global(stored: StoredMatrix, files: TensorFiles) -> torch.Tensor:
    """The global multiplier as [1]; compressed-tensors' divisor is inverted once, in float64."""
    info = stored.global_scale
    assert info is not None
    value = files.tensor(info).reshape(1).to(torch.float64)
    number = float(value)
    if not (0 < number < float("inf")):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found {number}, expected a positive number"
        )
    if (number > 1) != stored.global_divides and number != 1:
        side = "above 1 (it divides)" if stored.global_divides else "below 1 (it multiplies)"
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: found {number:g}, expected a value {side}; "
            "the convention of the global scale looks inverted"
        )
    return (1 / value if stored.global_divides else value).to(torch.float32)
