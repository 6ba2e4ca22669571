# mypy: ignore-errors
"""`rms_norm`, `kv_store` and `compress` in one launch, for one or a few new tokens per sequence.

A program is a token and a job: 0 the latent's norm, 1 the window key, 2 the entry, 3 the index key.
Each job runs its op's kernel code with the same tile and number of warps, so the bits are the same.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import ROW_WARPS, dependent_options
from dsv4.ops.kv import compress_triton, kv_store_triton
from dsv4.ops.kv.compress_triton import block_sizes, block_tensors, close_block
from dsv4.ops.kv.entry_device import entry_format, entry_pool
from dsv4.ops.kv.kv_store_triton import store_key
from dsv4.ops.norm import rms_norm_triton
from dsv4.ops.norm.rms_norm_triton import norm_row


@triton.jit(do_not_specialize=["w_width", "c_width"])
def _state_kernel(
    x, x_stride, x_weight, x_out, eps, frequencies, positions, seq_idx, of,
    key, w_table, w_width, w_entries, w_pool,
    c_block, c_pool, i_block, i_pool, c_table, c_width, c_entries,
    SIZE: tl.constexpr, S: tl.constexpr, I_S: tl.constexpr, F: tl.constexpr, I_F: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`of`: slots, starts and first rows of sequences. `key`: its projection, the stride of its
    rows, its norm. `c_*` are the entries' compressor and pool, `i_*` the index keys' (S and I_S:
    their sizes, None without them); both use the same table."""
    row = tl.program_id(0)
    job = tl.program_id(1)
    depend(DEPENDENT)
    if job == 0:
        norm_row(x, x_weight, x_out, row.to(tl.int64), x_stride, eps, SIZE, True)
    elif job == 1:
        store_key(
            key[0], key[1], key[2], frequencies, eps, positions, seq_idx, row, w_table, w_width,
            w_entries, w_pool, F,
        )  # fmt: skip
    elif S is not None:
        position = tl.load(positions + row).to(tl.int32)
        seq = tl.load(seq_idx + row).to(tl.int64)
        state_row = tl.load(of[0] + seq).to(tl.int64) * S.rows
        start = tl.load(of[1] + seq).to(tl.int32)
        first_row = tl.load(of[2] + seq).to(tl.int64)
        if (job == 2) & (position >= 0):
            close_block(
                c_block, frequencies, eps, row, position, seq, start, first_row, state_row,
                c_table, c_width, c_entries, c_pool, S, F, True,
            )  # fmt: skip
        if I_S is not None:  # noqa: SIM102 - decided by the compiler
            if (job == 3) & (position >= 0):
                close_block(
                    i_block, frequencies, eps, row, position, seq, start, first_row, state_row,
                    c_table, c_width, c_entries, i_pool, I_S, I_F, True,
                )  # fmt: skip


def supports(latent, norm, key, blocks) -> str | None:
    batch = key.batch
    if not batch.appends_at_once or batch.num_tokens == 0:
        return "not one or a few new tokens for each sequence"
    if norm is None or latent.dim() != 2:
        return "the latent's norm has no weight"
    reason = rms_norm_triton.supports(latent, norm, key.eps) or kv_store_triton.supports(key)
    for block in blocks:
        reason = reason or compress_triton.supports(block)
        if block.dtype != key.kv.dtype or block.eps != key.eps:
            reason = reason or "compressors and keys differ in dtype or eps"
    if blocks and _format(blocks[0], key) != _format(key, key):
        reason = reason or "entries and window keys differ in format"
    if len(blocks) == 2 and _differ(*blocks):
        reason = reason or "the two compressors differ in ratio, table or pages"
    return reason


def _format(of, key):
    return entry_format(of.pool, key.frequencies, key.kv.dtype)


def _differ(a, b) -> bool:
    return (
        a.ratio != b.ratio
        or a.table.data_ptr() != b.table.data_ptr()
        or a.table.shape != b.table.shape
        or a.pool.page_entries != b.pool.page_entries
    )


def run(latent, norm, key, blocks):
    x, kv, batch, window = latent, key.kv, key.batch, key.pool
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = (*blocks, None, None)[:2]
    to = first or key
    _state_kernel[(batch.num_tokens, 2 + len(blocks))](
        x, x.stride(0), norm, out, key.eps, key.frequencies,
        batch.positions, batch.seq_idx, (batch.slots, batch.starts, batch.first_rows),
        (kv, kv.stride(0), key.norm), key.table, key.table.shape[1], window.page_entries,
        entry_pool(window), *_tensors(first), *_tensors(second),
        to.table, to.table.shape[1], to.pool.page_entries,
        SIZE=x.shape[1], S=block_sizes(first) if first else None,
        I_S=block_sizes(second) if second else None, F=_format(key, key),
        I_F=_format(second, key) if second else None,
        **dependent_options(x.device, ROW_WARPS),
    )  # fmt: skip
    return out


def _tensors(block):
    return ((), ()) if block is None else (block_tensors(block), entry_pool(block.pool))
