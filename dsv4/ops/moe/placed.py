"""Experts that are not all in one stack: each has its own block, in a device slot or in host
memory, and kernels find it through a table of offsets.

A block holds an expert's two matrices, their parts at fixed places. Offsets count int16 elements
from the first slot's block: a kernel adds one number to pointers it already has, and reaches host
memory the same way. Global scales are small; those of all experts stay on the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.formats.quantized import RepackedTensor, Weight

ALIGNMENT = 256  # bytes, of a block and of each part
UNIT = 2  # bytes per unit of an offset
_BESIDE = "global_scale"


@dataclass(frozen=True)
class BlockPart:
    """A tensor inside a block."""

    name: str  # field of the weight; "" for a plain tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int  # byte

    def of(self, block: Tensor) -> Tensor:
        length = max(1, 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)))
        data = block[self.first : self.first + length * self.dtype.itemsize]
        return data.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of an expert's matrices lie; `examples` are those of any one expert."""

    examples: tuple[Weight, Weight]
    parts: tuple[tuple[BlockPart, ...], tuple[BlockPart, ...]]
    nbytes: int

    @classmethod
    def of(cls, w13: Weight, w2: Weight) -> "BlockLayout":
        found: list[tuple[BlockPart, ...]] = []
        at = 0
        for weight in (w13, w2):
            parts = []
            for name, value in _tensors(weight):
                if name != _BESIDE:
                    parts.append(
                        BlockPart(name, value.dtype, tuple(value.shape), value.stride(), at)
                    )
                    at += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
            found.append(tuple(parts))
        examples = w13.to("cpu"), w2.to("cpu")
        return cls(examples, (found[0], found[1]), at)

    def matrix(self, block: Tensor, which: int, beside: Tensor | None) -> Weight:
        """The weight in a block, as views; 0: w13, 1: w2."""
        example, parts = self.examples[which], self.parts[which]
        if isinstance(example, Tensor):
            return parts[0].of(block)
        values: dict[str, Any] = {part.name: part.of(block) for part in parts}
        if beside is not None:
            values[_BESIDE] = beside
        return replace(example, **values)

    def store(self, block: Tensor, which: int, weight: Weight) -> None:
        """Copy one expert's matrix into its block."""
        given = dict(_tensors(weight))
        for part in self.parts[which]:
            part.of(block).copy_(given[part.name])


def _tensors(weight: Weight) -> list[tuple[str, Tensor]]:
    return [("", weight)] if isinstance(weight, Tensor) else weight._tensors()


@dataclass(eq=False)
class ExpertTable:
    """Where one layer's experts are. Kernels read `offsets`, the host `blocks`; both change when an
    expert moves."""

    layout: BlockLayout
    base: Tensor  # the first slot's block, from which offsets count
    blocks: list[Tensor]  # uint8, by expert
    offsets: Tensor  # [experts] int64
    counts: Tensor  # [experts] int32: steps that visited it
    beside: tuple[Tensor | None, Tensor | None]  # global scales of all experts
    around_layer: Callable[[], AbstractContextManager[None]] = (
        nullcontext  # around a step's experts
    )

    @property
    def num_experts(self) -> int:
        return len(self.blocks)

    def matrix(self, which: int, expert: int) -> Weight:
        block, beside = self.blocks[expert], self.beside[which]
        if block.device != self.base.device:
            block = block.to(self.base.device)
        return self.layout.matrix(block, which, None if beside is None else beside[expert])

    def visited(self, experts: Tensor) -> None:
        """Count a step, where no kernel does."""
        self.counts[torch.unique(experts[experts >= 0])] += 1


def offset_of(block: Tensor, base: Tensor) -> int:
    return (block.data_ptr() - base.data_ptr()) // UNIT


@dataclass(frozen=True)
class PlacedExperts(RepackedTensor):
    """One of the two matrices, for all experts of a layer."""

    table: ExpertTable
    which: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.table.num_experts, *self.table.layout.examples[self.which].shape))

    @property
    def device(self) -> torch.device:
        return self.table.base.device

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            raise KernelError("placed experts are taken one by one")
        return self.table.matrix(self.which, index)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        found = [self[index] for index in range(self.table.num_experts)]
        return torch.stack([w.to(dtype) if isinstance(w, Tensor) else w.dequantize(dtype)
                            for w in found])  # fmt: skip

    @cached_property
    def stack(self) -> Any:
        """A stack for kernels: every expert is the first slot's, and a kernel adds the table's
        offset. Global scales are each expert's own."""
        table, beside = self.table, self.table.beside[self.which]
        first = table.layout.matrix(table.base, self.which, None if beside is None else beside[0])
        assert not isinstance(first, Tensor), "kernels read FP4"
        whole: Any = first.map(lambda value: value.expand(table.num_experts, *value.shape))
        return whole if beside is None else replace(whole, global_scale=beside)


def placed_pair(table: ExpertTable) -> tuple[PlacedExperts, PlacedExperts]:
    """w13 and w2."""
    widths = [
        "a16" if isinstance(example, Tensor) else example.activations
        for example in table.layout.examples
    ]
    w13, w2 = (PlacedExperts(table, i, activations=widths[i]) for i in (0, 1))
    return w13, w2


def stack_of(weight: Any) -> Any:
    """The weight as kernels read it."""
    return weight.stack if isinstance(weight, PlacedExperts) else weight


def table_of(weight: Any) -> tuple[Tensor | None, Tensor | None]:
    """Offsets and counts for kernels, or None if experts are a stack."""
    if not isinstance(weight, PlacedExperts):
        return None, None
    return weight.table.offsets, weight.table.counts
