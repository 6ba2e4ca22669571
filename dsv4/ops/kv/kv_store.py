"""The window key of each new token: RMS norm, rope, storage format, written to its page.

Key and value are the same vector; every layer keeps it for the last `sliding_window` tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.entry import kv_entry
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape
from dsv4.ops.core.ragged import Ragged, make_ragged
from dsv4.ops.kv.pool import PagedPool, allocate_pool, locate, store
from dsv4.ops.kv.rope import rope_frequencies, rope_reference
from dsv4.ops.norm.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class WindowKey:
    """`kv` `[tokens, dim]`: the projection before its norm; `pool` is written in place."""

    kv: Tensor
    norm: Tensor
    frequencies: Tensor
    eps: float
    batch: Ragged
    pool: PagedPool
    table: Tensor


def kv_store_reference(key: WindowKey) -> None:
    kv, positions, seq_idx = key.kv, key.batch.positions, key.batch.seq_idx
    if key.batch.is_padded:
        real = positions >= 0
        kv, positions, seq_idx = kv[real], positions[real], seq_idx[real]
    keys = rms_norm_reference(kv, key.norm, key.eps)
    keys = rope_reference(keys, positions, key.frequencies, inverse=False)
    store(key.pool, *locate(key.table, seq_idx, positions, key.pool.page_entries), keys)


def cases() -> Iterable[Case]:
    def build(kv_format: str, starts: list[int], num_new: list[int], dim: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            batch = make_ragged(starts, num_new, list(range(len(starts))), torch.device("cpu"))
            pages = torch.randperm(len(starts) * 5, generator=generator).view(len(starts), 5)
            pool = allocate_pool(
                kv_format, False, kv_entry(kv_format, dim, 16), (len(starts) * 5, 8), "cpu"
            )
            key = WindowKey(
                kv=torch.randn(batch.num_tokens, dim, generator=generator) * 4,
                norm=torch.rand(dim, generator=generator) + 0.5,
                frequencies=rope_frequencies(16, 10000.0),
                eps=1e-6,
                batch=batch,
                pool=pool,
                table=pages,
            )
            return {"key": key}

        return Case(f"{kv_format} {starts}+{num_new} dim {dim}", make, 1e-2, 1e-2)

    for kv_format in ("fp32", "bf16", "fp8"):
        yield build(kv_format, [0, 37], [3, 1], 32)
        yield build(kv_format, [5], [17], 80)
    yield build("fp8", [0, 4096], [1, 1], 512)


KERNELS, ON_CPU = (Kernel("dsv4.ops.kv.kv_store_triton"),), "dsv4.ops.cpu.kv"
OP = Op("kv_store", kv_store_reference, cases, KERNELS, ("key.pool",), ON_CPU)


def kv_store(key: WindowKey) -> None:
    check_shape(OP.name, "kv", key.kv, key.batch.num_tokens, key.norm.shape[0])
    check_shape(OP.name, "table", key.table, key.batch.starts.shape[0], "columns")
    if key.kv.shape[0] == 0:
        return
    OP(key.kv.device, key=key)
