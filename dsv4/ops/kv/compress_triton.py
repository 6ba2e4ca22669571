# mypy: ignore-errors
"""`compress` on a GPU: a program takes a few tokens and writes entries for those that end a block.

State rows that a block still needs are overwritten by later tokens of the same step, so one launch
closes blocks and a second stores the newest tokens. With one or a few new tokens per sequence there
is no such row (`Ragged.appends_at_once`), and the first launch does both.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, device_reason, launch_options
from dsv4.ops.kv import entry_device as ed
from dsv4.ops.kv.compress import overlaps

STEP = tl.constexpr(8)  # slots summed at a time; fixes the order of summation, so never varied
GROUP = 4  # tokens per program in prompts: usually one of them ends a block


class BlockTensors(NamedTuple):
    v: torch.Tensor
    z: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    state_v: torch.Tensor
    state_z: torch.Tensor


class BlockSizes(NamedTuple):
    """Constants of a compressor's kernels."""

    ratio: int
    rows: int
    width: int
    pad: int
    overlaps: bool


@triton.jit
def _block_softmax(block, last, start, first_row, state_row, S: tl.constexpr, F: tl.constexpr):
    """fp32 `[pad]`: the block that ends at `last`, softmax per channel, STEP slots at a time."""
    SLOTS: tl.constexpr = 2 * S.ratio if S.overlaps else S.ratio
    PAD: tl.constexpr = F.pad
    channel = tl.arange(0, PAD)
    inside = channel < F.dim
    top = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD,), tl.float32)
    for base in tl.range(0, SLOTS, STEP):
        place = base + tl.arange(0, STEP)
        token = last + 1 - SLOTS + place
        half = (place >= S.ratio).to(tl.int32) * F.dim if S.overlaps else place * 0
        column = half[:, None] + channel[None, :]
        is_new = token >= start  # otherwise it is in the state, if it exists
        mask = (token >= 0)[:, None] & inside[None, :]
        new_at = ((first_row + token - start) * S.width)[:, None] + column
        old_at = ((state_row + token % S.rows) * S.width)[:, None] + column
        ape_at = ((token % S.ratio) * S.width)[:, None] + column
        from_new = is_new[:, None]
        v_at = tl.where(from_new, block.v + new_at, block.state_v + old_at)
        z_at = tl.where(from_new, block.z + new_at, block.state_z + old_at)
        v = tl.load(v_at, mask=mask, other=0.0)
        z = tl.load(z_at, mask=mask, other=float("-inf"))
        z += tl.load(block.ape + ape_at, mask=mask & from_new, other=0.0)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shrink = tl.exp(top - new_top)
        weight = tl.exp(z - new_top[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(weight * v, axis=0)
        top = new_top
    return tl.where(inside, acc / total, 0.0)


@triton.jit
def _copy_token(
    block, row, position, to_v, to_z, to_row, S: tl.constexpr, WIDTH: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Copy a token's first WIDTH channels to a row of that width."""
    column = tl.arange(0, PAD)
    live = column < WIDTH
    source, target = row * S.width + column, to_row * WIDTH + column
    v = tl.load(block.v + source, mask=live, other=0.0)
    z = tl.load(block.z + source, mask=live, other=0.0)
    z += tl.load(block.ape + (position % S.ratio) * S.width + column, mask=live, other=0.0)
    tl.store(to_v + target, v, mask=live)
    tl.store(to_z + target, z, mask=live)


@triton.jit
def _remember(block, row, position, state_row, S: tl.constexpr):
    to_row = state_row + position % S.rows
    _copy_token(block, row, position, block.state_v, block.state_z, to_row, S, S.width, S.pad)


@triton.jit
def close_block(
    block, frequencies, eps, row, position, seq, start, first_row, state_row, table, table_width,
    page_entries, pool, S: tl.constexpr, F: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """One token: if it ends a block, store the entry; with APPEND, add the token to the state."""
    if (position + 1) % S.ratio == 0:
        x = _block_softmax(block, position, start, first_row, state_row, S, F)
        x = x.to(F.dtype).to(tl.float32)[None, :]
        slot = ed.entry_slot(table, table_width, seq, position // S.ratio, page_entries)
        ed.finish_entry(x, block.norm, frequencies, position + 1 - S.ratio, eps, pool, slot, F)
    if APPEND:
        _remember(block, row.to(tl.int64), position, state_row, S)


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def _close_kernel(
    block, frequencies, eps, positions, seq_idx, first_rows, starts, slots, table, table_width,
    page_entries, pool, num_rows, S: tl.constexpr, F: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP 1: the token is also added to the state."""
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    known = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int32)
    is_wanted = (rows < num_rows) & (known >= 0) & ((GROUP == 1) | ((known + 1) % S.ratio == 0))
    rank = tl.cumsum(is_wanted.to(tl.int32))
    for number in tl.range(0, tl.max(rank)):
        is_next = is_wanted & (rank == number + 1)
        row = tl.max(tl.where(is_next, rows, 0))
        position = tl.max(tl.where(is_next, known, 0))
        seq = tl.load(seq_idx + row).to(tl.int64)
        state_row = tl.load(slots + seq).to(tl.int64) * S.rows
        start = tl.load(starts + seq).to(tl.int32)
        first_row = tl.load(first_rows + seq).to(tl.int64)
        close_block(
            block, frequencies, eps, row, position, seq, start, first_row, state_row, table,
            table_width, page_entries, pool, S, F, GROUP == 1,
        )  # fmt: skip


@triton.jit
def _append_kernel(
    block, first_rows, starts, ends, slots, keep_ends, keep_rows, kept_v, kept_z, S: tl.constexpr
):
    """Store one of a sequence's newest tokens, in descending order. The remaining programs store
    the first half of the channels of the tokens before a kept boundary."""
    seq = tl.program_id(0)
    start = tl.load(starts + seq).to(tl.int32)
    first_row = tl.load(first_rows + seq).to(tl.int64)
    if tl.program_id(1) < S.rows:
        position = tl.load(ends + seq).to(tl.int32) - 1 - tl.program_id(1)
        if position >= start:
            state_row = tl.load(slots + seq).to(tl.int64) * S.rows
            _remember(block, first_row + position - start, position, state_row, S)
    else:
        end = tl.load(keep_ends + seq).to(tl.int32)
        place = tl.program_id(1) - S.rows
        position = end - S.ratio + place
        if end > 0:
            to_row = tl.load(keep_rows + seq).to(tl.int64) * S.ratio + place
            _copy_token(
                block, first_row + position - start, position, kept_v, kept_z, to_row, S,
                S.width // 2, S.pad // 2,
            )  # fmt: skip


def block_tensors(block) -> BlockTensors:
    state = block.state
    return BlockTensors(block.values, block.gates, block.ape, block.norm, state.values, state.gates)


def block_sizes(block) -> BlockSizes:
    width, ratio = block.values.shape[1], block.ratio
    pad = triton.next_power_of_2(width)
    return BlockSizes(ratio, block.state.rows, width, pad, overlaps(ratio))


def supports(block) -> str | None:
    batch, pool = block.batch, block.pool
    for name, tensor in block_tensors(block)._asdict().items():
        if name != "norm" and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            return f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous fp32"
    if block.dtype not in (torch.float32, torch.bfloat16):
        return f"entries rounded to {block.dtype}, kernels know bfloat16 and float32"
    if 2 * block.frequencies.shape[0] > pool.dim:
        return f"{block.frequencies.shape[0]} frequencies for entries of {pool.dim}"
    return (
        device_reason(block.values.device)
        or ed.pool_reason(pool)
        or ed.index_tensors_reason(
            table=block.table, positions=batch.positions, seq_idx=batch.seq_idx, slots=batch.slots
        )
    )


def run(block) -> None:
    batch, state, pool, table = block.batch, block.state, block.pool, block.table
    tensors, sizes = block_tensors(block), block_sizes(block)
    group = 1 if batch.appends_at_once else GROUP
    _close_kernel[(triton.cdiv(batch.num_tokens, group),)](
        tensors, block.frequencies, block.eps, batch.positions, batch.seq_idx, batch.first_rows,
        batch.starts, batch.slots, table, table.shape[1], pool.page_entries, ed.entry_pool(pool),
        batch.num_tokens, S=sizes, F=ed.entry_format(pool, block.frequencies, block.dtype),
        GROUP=group, **launch_options(ROW_WARPS),
    )  # fmt: skip
    if not batch.appends_at_once:
        keep, starts = batch.keep, batch.starts
        keeps = keep is not None and state.kept_values is not None
        _append_kernel[(starts.shape[0], state.rows + (block.ratio if keeps else 0))](
            tensors, batch.first_rows, starts, batch.ends, batch.slots,
            *((keep.ends, keep.rows) if keeps else (starts, starts)),
            *((state.kept_values, state.kept_gates) if keeps else tensors[:2]),
            S=sizes, **launch_options(ROW_WARPS),
        )  # fmt: skip
