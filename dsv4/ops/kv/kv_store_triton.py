# mypy: ignore-errors
"""`kv_store` on a GPU: one program per token; norm, rope, rounding and the page in one pass."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, device_reason, launch_options
from dsv4.ops.kv import entry_device as ed


@triton.jit
def store_key(
    kv, kv_stride, norm, frequencies, eps, positions, seq_idx, row, table, table_width,
    page_entries, pool, F: tl.constexpr,
):  # fmt: skip
    """Store the key of one token: norm, rope, rounding, page; skips padding rows."""
    position = tl.load(positions + row)
    if position >= 0:
        slot = ed.entry_slot(table, table_width, tl.load(seq_idx + row), position, page_entries)
        channel = tl.arange(0, F.pad)[None, :]
        source = kv + row.to(tl.int64) * kv_stride + channel
        x = tl.load(source, mask=channel < F.dim, other=0.0).to(tl.float32)
        ed.finish_entry(x, norm, frequencies, position, eps, pool, slot, F)


@triton.jit(do_not_specialize=["table_width"])
def _kv_store_kernel(
    kv, kv_stride, norm, frequencies, eps, positions, seq_idx, table, table_width, page_entries,
    pool, F: tl.constexpr,
):  # fmt: skip
    store_key(
        kv, kv_stride, norm, frequencies, eps, positions, seq_idx, tl.program_id(0), table,
        table_width, page_entries, pool, F,
    )  # fmt: skip


def supports(key) -> str | None:
    kv, pool, batch = key.kv, key.pool, key.batch
    if kv.dtype not in (torch.float32, torch.bfloat16) or kv.stride(-1) != 1:
        return f"kv is {kv.dtype} with strides {kv.stride()}, kernels read bfloat16 or float32 rows"
    if 2 * key.frequencies.shape[0] > pool.dim:
        return f"{key.frequencies.shape[0]} frequencies for entries of {pool.dim}"
    return (
        device_reason(kv.device)
        or ed.pool_reason(pool)
        or ed.index_tensors_reason(
            table=key.table, positions=batch.positions, seq_idx=batch.seq_idx
        )
    )


def run(key) -> None:
    kv, pool, batch = key.kv, key.pool, key.batch
    _kv_store_kernel[(kv.shape[0],)](
        kv, kv.stride(0), key.norm, key.frequencies, key.eps, batch.positions, batch.seq_idx,
        key.table, key.table.shape[1], pool.page_entries, ed.entry_pool(pool),
        F=ed.entry_format(pool, key.frequencies, kv.dtype), **launch_options(ROW_WARPS),
    )  # fmt: skip
