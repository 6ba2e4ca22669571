"""Paged entries of one layer: their locations and storage formats.

A page table row lists a sequence's pages; entry `i` is in page `table[(i // page) % width]`, so a
table narrower than the sequence works as a ring (the window).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats import e8m0, fp4, fp8
from dsv4.formats.entry import INDEX_GROUP, KV_GROUP, Part


@dataclass(frozen=True)
class PagedPool:
    """Pages of one layer, `[pages, entries, width]` for each part of an entry."""

    format: str  # fp8, fp4, bf16, fp32
    is_index: bool  # index keys: rotated by a Hadamard matrix when stored in fp8 or fp4
    parts: dict[str, Tensor]

    @property
    def data(self) -> Tensor:
        return self.parts["data"]

    @property
    def page_entries(self) -> int:
        return self.data.shape[1]

    @property
    def dim(self) -> int:
        """Numbers in an entry."""
        packed = 2 if self.format == "fp4" else 1
        tail = self.parts["tail"].shape[-1] if "tail" in self.parts else 0
        return self.data.shape[-1] * packed + tail

    @property
    def device(self) -> torch.device:
        return self.data.device


def allocate_pool(
    entry_format: str, is_index: bool, parts: tuple[Part, ...], shape: tuple[int, ...], device: str
) -> PagedPool:
    """A pool of `shape` = (pages, entries), or (layers, pages, entries), filled with NaN or 0xFF.

    Unwritten entries must not look plausible.
    """
    tensors = {}
    for part in parts:
        dtype = getattr(torch, part.dtype)
        size = (*shape, part.width)
        if dtype in (torch.float32, torch.bfloat16):
            tensors[part.name] = torch.full(size, float("nan"), dtype=dtype, device=device)
        else:
            tensors[part.name] = torch.full(size, 255, dtype=torch.uint8, device=device).view(dtype)
    return PagedPool(entry_format, is_index, tensors)


def locate(
    table: Tensor, seq_idx: Tensor, entries: Tensor, page_entries: int
) -> tuple[Tensor, Tensor]:
    """Page and offset of `entries` of the sequences `seq_idx` (same shapes, broadcast)."""
    width = table.shape[1]
    column = torch.div(entries, page_entries, rounding_mode="floor").remainder_(width)
    pages = table.take(column.add_(seq_idx * width))
    return pages.long(), entries % page_entries


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard rotation of the last axis (a power of two), in fp32."""
    size = x.shape[-1]
    wide = x.float().reshape(-1, size)
    step = 1
    while step < size:
        pairs = wide.view(-1, size // (2 * step), 2, step)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        wide = torch.stack((upper + lower, upper - lower), dim=2).view(-1, size)
        step *= 2
    return (wide * (1.0 / math.sqrt(size))).view(x.shape).to(x.dtype)


def rotates(index_format: str) -> bool:
    """Whether index queries and keys are Hadamard-rotated; without rounding it has no effect."""
    return index_format in ("fp4", "fp8")


def pack(pool: PagedPool, x: Tensor) -> dict[str, Tensor]:
    """Pack entries `[m, dim]` into the pool's parts. NaN stays NaN; in FP4 the scale has it."""
    if pool.format in ("bf16", "fp32"):
        return {"data": x.to(pool.data.dtype)}
    if not pool.is_index:
        nope_dim = pool.data.shape[-1]
        data, scale = fp8.quantize_groups(x[:, :nope_dim].float(), KV_GROUP, check=False)
        padded = scale.new_zeros(x.shape[0], pool.parts["scale"].shape[-1])
        padded[:, : scale.shape[1]] = scale
        return {"data": data, "tail": x[:, nope_dim:].to(torch.bfloat16), "scale": padded}
    x = hadamard(x).float()
    if pool.format == "fp4":
        packed, scale = fp4.quantize_groups(x, INDEX_GROUP, check=False)
        return {"data": packed, "scale": scale}
    data, scale = fp8.quantize_groups(x, x.shape[-1], check=False)
    return {"data": data, "scale": e8m0.decode(scale)}


def unpack(pool: PagedPool, parts: dict[str, Tensor]) -> Tensor:
    """The numbers (fp32) that `pack` stored; index keys stay rotated."""
    data = parts["data"]
    if pool.format in ("bf16", "fp32"):
        return data.float()
    if not pool.is_index:
        num_groups = -(-data.shape[-1] // KV_GROUP)
        nope = fp8.dequantize_groups(data, parts["scale"][..., :num_groups], KV_GROUP)
        return torch.cat((nope, parts["tail"].float()), dim=-1)
    if pool.format == "fp4":
        return fp4.dequantize_groups(data, parts["scale"], INDEX_GROUP)
    return data.float() * parts["scale"]


def store(pool: PagedPool, pages: Tensor, offsets: Tensor, x: Tensor) -> None:
    """Write entries `[m, dim]` at `pages`, `offsets` `[m]`."""
    store_at(pool, pages * pool.page_entries + offsets, x)


def store_at(pool: PagedPool, entries: Tensor, x: Tensor) -> None:
    """Write entries `[m, dim]` at `entries` `[m]`, counted over all pages."""
    for name, part in pack(pool, x).items():
        target = pool.parts[name]
        if part.dtype == torch.float8_e4m3fn:  # index assignment is not defined for fp8
            target, part = target.view(torch.uint8), part.view(torch.uint8)
        target.view(-1, target.shape[-1]).index_copy_(0, entries, part)


def load(pool: PagedPool, pages: Tensor, offsets: Tensor) -> Tensor:
    """Read entries as fp32, `[..., dim]`."""
    return load_at(pool, pages * pool.page_entries + offsets)


def load_at(pool: PagedPool, entries: Tensor) -> Tensor:
    """Read entries, counted over all pages, as fp32 `[..., dim]`."""
    gathered = {}
    for name, part in pool.parts.items():
        stored = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        rows = stored.view(-1, part.shape[-1]).index_select(0, entries.flatten())
        gathered[name] = rows.view(part.dtype).view(*entries.shape, -1)
    return unpack(pool, gathered)


def round_trip_index(x: Tensor, index_format: str) -> Tensor:
    """An index query rotated and rounded like the stored keys."""
    if not rotates(index_format):
        return x.to(torch.bfloat16).to(x.dtype) if index_format == "bf16" else x
    return round_index(hadamard(x), index_format)


def round_index(x: Tensor, index_format: str) -> Tensor:
    """A rotated query rounded like keys; idempotent."""
    wide = x.float().reshape(-1, x.shape[-1])
    if index_format == "fp4":
        packed = fp4.quantize_groups(wide, INDEX_GROUP, check=False)
        rounded = fp4.dequantize_groups(*packed, INDEX_GROUP)
    else:
        group = x.shape[-1]
        rounded = fp8.dequantize_groups(*fp8.quantize_groups(wide, group, check=False), group)
    return rounded.view(x.shape).to(x.dtype)
