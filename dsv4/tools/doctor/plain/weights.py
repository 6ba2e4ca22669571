"""Weights as plain numbers, read from the files without the engine's loader.

The same code also *misreads* a weight in each known way (a dropped scale, swapped nibbles, ...).
When an op is wrong because of its weight, the misreading that matches the engine's values is the
cause.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.sources import Source
from dsv4.checkpoint.stored_matrix import StoredMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_SCALES = ("without block scales", "with block scales inverted", "with block scales transposed")
_FP4 = ("with the nibbles in the other order", *_SCALES)
# every way in which a stored format has been misread
MISREADINGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "fp8": _SCALES,
    "mxfp4": _FP4,
    "nvfp4": (
        *_FP4,
        "without the second (global) scale",
        "with the global scale inverted",
        "with the activation's scale multiplied in",
    ),
}
_OF_JOINED = "with gate and up swapped"
_OF_SQUARE = "transposed"
_OF_ROTARY = "with rotary channels as two halves instead of pairs"


@dataclass(frozen=True)
class Raw:
    """One stored matrix: the bytes of its parts."""

    format: str
    data: Tensor
    scale: Tensor | None = None
    factor: float = 1.0  # the global multiplier
    activation: float = 1.0
    tile: tuple[int, int] = (0, 0)  # FP8


def decode(raw: Raw, misread: str = "") -> Tensor:
    """The values (float64), read correctly or misread."""
    if raw.format == "plain":
        return raw.data.double()
    assert raw.scale is not None
    values = _fp4(raw.data, misread) if raw.format != "fp8" else raw.data.double()
    scale = _scale_numbers(raw.scale)
    if misread == "without block scales":
        scale = torch.ones_like(scale)
    elif misread == "with block scales inverted":
        scale = 1 / scale
    elif misread == "with block scales transposed":
        scale = scale.T.reshape(scale.shape)
    rows, columns = values.shape
    if raw.format == "fp8":
        scale = scale.repeat_interleave(raw.tile[0], 0)[:rows]
    width = raw.tile[1] if raw.format == "fp8" else columns // scale.shape[1]
    values = values * scale.repeat_interleave(width, 1)[:, :columns]
    if misread == "with the activation's scale multiplied in":
        values = values * raw.activation
    if misread == "with the global scale inverted":
        return values / raw.factor
    return values if misread == "without the second (global) scale" else values * raw.factor


def _fp4(packed: Tensor, misread: str) -> Tensor:
    nibbles = [packed & 15, packed >> 4]
    if misread == "with the nibbles in the other order":
        nibbles.reverse()
    codes = torch.stack(nibbles, dim=-1).flatten(-2).long()
    sizes = torch.tensor(_E2M1, dtype=torch.float64, device=packed.device)[codes & 7]
    return torch.where(codes >= 8, -sizes, sizes)


def _scale_numbers(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:  # E8M0
        return torch.exp2(scale.double() - 127)
    return scale.double()


class PlainWeights:
    """Canonical names to numbers. `expert` picks one of a stack of experts."""

    def __init__(self, names: Mapping[str, Callable[[int | None], list[Raw]]]) -> None:
        self._raw = names  # each returns the stacked matrices
        self._kept: tuple[str, Tensor] | None = None  # the last one of `rows`

    @classmethod
    def from_tensors(cls, table: Mapping[str, Tensor]) -> "PlainWeights":
        def reader(weight: Tensor) -> Callable[[int | None], list[Raw]]:
            return lambda expert: [Raw("plain", weight if expert is None else weight[expert])]

        return cls({name: reader(weight) for name, weight in table.items()})

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "PlainWeights":
        files = TensorFiles()

        def reader(source: Source) -> Callable[[int | None], list[Raw]]:
            return lambda expert: _cells(source, files, expert)

        return cls({name: reader(source) for name, source in checkpoint.sources.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def tensor(self, name: str, expert: int | None = None) -> Tensor:
        return torch.cat([decode(raw) for raw in self._raw[name](expert)])

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Some rows of a matrix that is never quantised: the embedding or the head."""
        if self._kept is None or self._kept[0] != name:
            [raw] = self._raw[name](None)
            assert raw.format == "plain"
            self._kept = name, raw.data
        return self._kept[1][numbers].double()

    def misreadings(self, name: str, expert: int | None, rope: int) -> Iterator[tuple[str, Tensor]]:
        """Every misreading of a matrix, with its name; `rope` is the number of rotary rows."""
        parts = self._raw[name](expert)
        for label in MISREADINGS[parts[0].format]:
            yield label, torch.cat([decode(raw, label) for raw in parts])
        right = torch.cat([decode(raw) for raw in parts])
        if name.endswith("w13"):
            yield _OF_JOINED, torch.cat(right.chunk(2)[::-1])
        if right.dim() == 2 and right.shape[0] == right.shape[1]:
            yield _OF_SQUARE, right.T
        if name.endswith("attn.wkv.weight"):
            tail = right[-rope:]
            yield _OF_ROTARY, torch.cat((right[:-rope], tail[0::2], tail[1::2]))


def _cells(source: Source, files: TensorFiles, expert: int | None) -> list[Raw]:
    cells = [cell for cell in source.matrices if cell.expert in (None, expert)]
    return [_raw(cell.stored, files) for cell in sorted(cells, key=lambda cell: cell.part)]


def _raw(stored: StoredMatrix, files: TensorFiles) -> Raw:
    data = files.tensor(stored.data)
    scale = files.tensor(stored.scale) if stored.scale is not None else None
    factor = activation = 1.0
    if stored.global_scale is not None:
        number = float(files.tensor(stored.global_scale))
        factor = float(torch.tensor(1 / number if stored.global_divides else number).float())
    if stored.input_scale is not None:
        activation = float(files.tensor(stored.input_scale))
    return Raw(stored.format, data, scale, factor, activation, stored.tile)
