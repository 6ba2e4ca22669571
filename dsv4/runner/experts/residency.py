"""Where every expert is, and how experts move.

Tables are on the device and change between steps, on the steps' own stream; old places stay valid
until everything queued before the change has run. Captured graphs therefore need no update, and no
step waits for a copy.

A prompt visits nearly all experts: while a layer computes, the copy engine prefetches the missing
experts of the next one into one of two staging buffers, and that step's tables point there. On a
CPU the same happens without streams.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.formats.quantized import Nvfp4Tensor, Weight
from dsv4.ops.moe.placed import BlockLayout, ExpertTable, PlacedExperts, offset_of, placed_pair
from dsv4.runner.experts.budget import ExpertBudget
from dsv4.runner.experts.host_memory import HostMemory

STAGED_ROWS = 512  # a step with at least this many rows prefetches missing experts
Expert = tuple[int, int]  # layer, expert


class Residency:
    def __init__(
        self, layout: BlockLayout, budget: ExpertBudget, resident: Any, device: torch.device
    ) -> None:
        """`resident`: bool `[layers, experts]`, true for as many experts as there are slots."""
        self.layout, self.budget, self.device = layout, budget, device
        self.resident = resident.copy()
        self.staged_rows = STAGED_ROWS
        self.on_gpu = device.type == "cuda"
        layers, experts, nbytes = budget.num_layers, budget.num_experts, layout.nbytes
        count = budget.slots + 1 + 2 * budget.staged
        self.host = HostMemory(budget.missing + 1, nbytes, pinned=self.on_gpu)
        self.pool = torch.empty(count, nbytes, dtype=torch.uint8, device=device)
        slots, blocks = list(self.pool.unbind(0)), list(self.host.blocks)
        self._staging = slots[-budget.staged :], slots[-2 * budget.staged : -budget.staged]
        padded = -(-experts // 16) * 16  # equally aligned rows: kernels compile once
        self.offsets = torch.zeros(layers, padded, dtype=torch.int64, device=device)
        self.counts = torch.zeros(layers, padded, dtype=torch.int32, device=device)
        self._staged_offsets = torch.zeros_like(self.offsets)
        self._rows = torch.zeros(2, layers, padded, dtype=torch.int64, pin_memory=self.on_gpu)
        self._turn = 0
        self.tables = []
        host_rows = torch.zeros(layers, padded, dtype=torch.int64)
        for layer in range(layers):
            places = [slots.pop(0) if resident[layer, e] else blocks.pop() for e in range(experts)]
            table = ExpertTable(
                layout, self.pool[0], places, self.offsets[layer, :experts],
                self.counts[layer, :experts], self._beside(experts),
                partial(self._around_layer, layer),
            )  # fmt: skip
            host_rows[layer, :experts] = torch.tensor([offset_of(b, self.pool[0]) for b in places])
            self.tables.append(table)
        self.offsets.copy_(host_rows)
        self._spare_slot, (self._spare_block,) = slots[0], blocks
        self._moving: tuple[Expert, Expert] | None = None
        self._copied = 0  # bytes of each of the two
        self._arrived: Any = None  # the end of the newest copy
        self._is_staging = False
        self._copies = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self._swaps = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self._ready: list[Any] = [None, None]
        self._steps_done: list[Any] = [None, None]

    def _beside(self, experts: int) -> tuple[Tensor | None, Tensor | None]:
        """Global scales; NVFP4 gate and up may differ, even if the first expert's do not."""
        found = []
        for which, example in enumerate(self.layout.examples):
            scale = getattr(example, "global_scale", None)
            if scale is not None:
                parts = 2 if which == 0 and isinstance(example, Nvfp4Tensor) else scale.shape[-1]
                scale = torch.zeros(experts, parts, device=self.device)
            found.append(scale)
        return found[0], found[1]

    def experts(self, layer: int) -> tuple[PlacedExperts, PlacedExperts]:
        """w13 and w2 of a layer's block."""
        return placed_pair(self.tables[layer])

    def fill(self, layer: int, which: int, first: int, stack: Weight) -> int:
        """Put matrices of experts from `first` on into their places; returns the next expert."""
        table = self.tables[layer]
        for index in range(stack.shape[0]):
            self.layout.store(table.blocks[first + index], which, stack[index])
        beside, scales = table.beside[which], getattr(stack, "global_scale", None)
        if beside is not None and scales is not None:
            beside[first : first + stack.shape[0]].copy_(scales)
        return first + int(stack.shape[0])

    def close(self) -> None:
        """Free the pinned memory; no step may follow."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        for table in self.tables:
            table.blocks.clear()
        self._spare_block = self._spare_slot
        self.host.close()

    # --- swaps --------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        return self._moving is not None

    @property
    def settled(self) -> Any:
        """`resident` as it will be after the swap in flight."""
        found = self.resident.copy()
        if self._moving is not None:
            leaves, comes = self._moving
            found[leaves], found[comes] = False, True
        return found

    def begin_swap(self, leaves: Expert, comes: Expert) -> None:
        assert self._moving is None
        assert self.resident[leaves]
        assert not self.resident[comes]
        self._moving, self._copied, self._arrived = (leaves, comes), 0, None

    def copy_some(self, nbytes: int) -> None:
        """Copy the next bytes of both experts after what is queued, concurrently with steps."""
        assert self._moving is not None
        leaves, comes = self._moving
        some = slice(self._copied, min(self._copied + nbytes, self.layout.nbytes))
        if some.start == some.stop:
            return
        with self._stream(self._swaps):
            self._spare_slot[some].copy_(self._block(comes)[some], non_blocking=True)
            self._spare_block[some].copy_(self._block(leaves)[some], non_blocking=True)
            self._copied, self._arrived = some.stop, self.recorded()

    def finish_swap(self) -> bool:
        """Point the tables at the new places if all bytes have arrived. Call between steps."""
        assert self._moving is not None
        leaves, comes = self._moving
        if self._copied < self.layout.nbytes:
            return False
        if self._arrived is not None and not self._arrived.query():
            return False
        old_slot, old_block = self._block(leaves), self._block(comes)
        self._place(comes, self._spare_slot)
        self._place(leaves, self._spare_block)
        self._spare_slot, self._spare_block = old_slot, old_block
        self.resident[leaves], self.resident[comes] = False, True
        self._moving = None
        return True

    def _block(self, expert: Expert) -> Tensor:
        return self.tables[expert[0]].blocks[expert[1]]

    def _place(self, expert: Expert, block: Tensor) -> None:
        self.tables[expert[0]].blocks[expert[1]] = block
        self.offsets[expert].fill_(offset_of(block, self.pool[0]))

    # --- prompts ------------------------------------------------------------------------------

    def step(self, rows: int) -> AbstractContextManager[None]:
        """Context of a step that is not a graph: with many rows, missing experts are staged."""
        return self._staged_step() if rows >= self.staged_rows else nullcontext()

    @contextmanager
    def _staged_step(self) -> Iterator[None]:
        self._turn = 1 - self._turn
        if self._steps_done[self._turn] is not None:
            self._steps_done[self._turn].synchronize()  # its rows of offsets will be overwritten
        self._staged: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._is_staging = True
        try:
            for layer in range(min(2, self.budget.num_layers)):
                self._stage(layer)
            yield
        finally:
            self._is_staging = False
            self._steps_done[self._turn] = self.recorded()

    def _stage(self, layer: int) -> None:
        """Copy the missing experts of a layer that fit in the buffer, after everything queued so
        far; the others are read in place."""
        table, buffer = self.tables[layer], self._staging[layer % 2]
        missing = np.flatnonzero(~self.resident[layer])[: len(buffer)]
        blocks = list(table.blocks)
        row = self._rows[self._turn, layer]
        with self._stream(self._copies):
            for expert, place in zip(missing.tolist(), buffer, strict=False):
                place.copy_(blocks[expert], non_blocking=True)
                blocks[expert] = place
            found = [offset_of(block, self.pool[0]) for block in blocks]
            row[: len(found)] = torch.tensor(found)
            self._staged_offsets[layer].copy_(row, non_blocking=True)
            self._ready[layer % 2] = self.recorded()
        self._staged[layer] = blocks, self._staged_offsets[layer, : len(found)]

    def _around_layer(self, layer: int) -> AbstractContextManager[None]:
        return self._staged_layer(layer) if self._is_staging else nullcontext()

    @contextmanager
    def _staged_layer(self, layer: int) -> Iterator[None]:
        table = self.tables[layer]
        if self._ready[layer % 2] is not None:
            self._ready[layer % 2].wait()
        kept = table.blocks, table.offsets
        table.blocks, table.offsets = self._staged.pop(layer)
        try:
            yield
        finally:
            table.blocks, table.offsets = kept
        if layer + 2 < self.budget.num_layers:
            self._stage(layer + 2)

    # --- streams ------------------------------------------------------------------------------

    def _stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work on another stream, after everything queued on the steps' own."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def recorded(self) -> Any:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
