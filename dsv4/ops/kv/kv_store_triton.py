# mypy: ignore-errors
"""`kv_store` on a GPU: one program per token; norm, rope, rounding and the page in one pass."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, device_reason, launch_options
from dsv4.ops.kv.entry_device import (
    entry_slot,
    finish_entry,
    index_tensors_reason,
    pool_constants,
    pool_reason,
    pool_tensors,
    tl_dtype,
)


@triton.jit
def store_key(
    kv, kv_stride, norm, frequencies, positions, seq_idx, row, table, table_width, page_entries,
    eps, data, tail, scale,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    SCALES: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROPE: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Store the key of one token: norm, rope, rounding, page; skips padding rows."""
    position = tl.load(positions + row)
    if position >= 0:
        slot = entry_slot(table, table_width, tl.load(seq_idx + row), position, page_entries)
        channel = tl.arange(0, PAD)[None, :]
        source = kv + row.to(tl.int64) * kv_stride + channel
        x = tl.load(source, mask=channel < DIM, other=0.0).to(tl.float32)
        finish_entry(
            x, norm, frequencies, position, eps, data, tail, scale, slot,
            FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_width"])
def _kv_store_kernel(
    kv, kv_stride, norm, frequencies, positions, seq_idx, table, table_width, page_entries, eps,
    data, tail, scale,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    SCALES: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROPE: tl.constexpr,
    DT: tl.constexpr
):  # fmt: skip
    store_key(
        kv, kv_stride, norm, frequencies, positions, seq_idx, tl.program_id(0), table,
        table_width, page_entries, eps, data, tail, scale,
        FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
    )  # fmt: skip


def supports(kv, norm, frequencies, eps, batch, pool, table) -> str | None:
    if kv.dtype not in (torch.float32, torch.bfloat16) or kv.stride(-1) != 1:
        return f"kv is {kv.dtype} with strides {kv.stride()}, kernels read bfloat16 or float32 rows"
    if 2 * frequencies.shape[0] > pool.dim:
        return f"{frequencies.shape[0]} frequencies for entries of {pool.dim}"
    return (
        device_reason(kv.device)
        or pool_reason(pool)
        or index_tensors_reason(table=table, positions=batch.positions, seq_idx=batch.seq_idx)
    )


def run(kv, norm, frequencies, eps, batch, pool, table) -> None:
    _kv_store_kernel[(kv.shape[0],)](
        kv,
        kv.stride(0),
        norm,
        frequencies,
        batch.positions,
        batch.seq_idx,
        table,
        table.shape[1],
        pool.page_entries,
        eps,
        *pool_tensors(pool),
        **pool_constants(pool),
        ROPE=2 * frequencies.shape[0],
        DT=tl_dtype(kv.dtype),
        **launch_options(ROW_WARPS),
    )
