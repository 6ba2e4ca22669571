# mypy: ignore-errors
"""`compress` on a GPU: a program takes a few tokens and writes entries for those that end a block.

State rows that a block still needs are overwritten by later tokens of the same step, so one launch
closes blocks and a second stores the newest tokens. With one or a few new tokens per sequence there
is no such row (`Ragged.appends_at_once`), and the first launch does both.
"""

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

STEP = 8  # slots summed at a time; fixes the order of summation, so never varied
GROUP = 4  # tokens per program in prompts: usually one of them ends a block


@triton.jit
def _block_softmax(
    values, gates, ape, state_v, state_z, last, start, first_row, state_row,
    RATIO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """fp32 `[PAD]`: the block that ends at `last`, softmax per channel, STEP slots at a time."""
    WIDTH: tl.constexpr = 2 * DIM if OVERLAP else DIM
    channel = tl.arange(0, PAD)
    inside = channel < DIM
    top = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD,), tl.float32)
    for base in tl.range(0, SLOTS, STEP):
        place = base + tl.arange(0, STEP)
        token = last + 1 - SLOTS + place
        half = (place >= RATIO).to(tl.int32) * DIM if OVERLAP else place * 0
        column = half[:, None] + channel[None, :]
        is_new = token >= start  # otherwise it is in the state, if it exists
        mask = (token >= 0)[:, None] & inside[None, :]
        new_at = ((first_row + token - start) * WIDTH)[:, None] + column
        old_at = ((state_row + token % ROWS) * WIDTH)[:, None] + column
        ape_at = ((token % RATIO) * WIDTH)[:, None] + column
        from_new = is_new[:, None]
        v = tl.load(tl.where(from_new, values + new_at, state_v + old_at), mask=mask, other=0.0)
        z = tl.load(
            tl.where(from_new, gates + new_at, state_z + old_at), mask=mask, other=float("-inf")
        )
        z += tl.load(ape + ape_at, mask=mask & from_new, other=0.0)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shrink = tl.exp(top - new_top)
        weight = tl.exp(z - new_top[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(weight * v, axis=0)
        top = new_top
    return tl.where(inside, acc / total, 0.0)


@triton.jit
def _remember(
    values, gates, ape, state_v, state_z, row, position, state_row, RATIO: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WPAD)
    live = column < WIDTH
    source = row.to(tl.int64) * WIDTH + column
    target = (state_row + position % ROWS) * WIDTH + column
    v = tl.load(values + source, mask=live, other=0.0)
    z = tl.load(gates + source, mask=live, other=0.0)
    z += tl.load(ape + (position % RATIO) * WIDTH + column, mask=live, other=0.0)
    tl.store(state_v + target, v, mask=live)
    tl.store(state_z + target, z, mask=live)


@triton.jit
def close_block(
    values, gates, ape, norm, frequencies, state_v, state_z, row, position, seq, start, first_row,
    state_row, table, table_width, page_entries, eps, data, tail, scale,
    RATIO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr, APPEND: tl.constexpr,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    SCALES: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROPE: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """One token: store the entry if it ends a block; with APPEND also add it to the state."""
    if (position + 1) % RATIO == 0:
        x = _block_softmax(
            values, gates, ape, state_v, state_z, position, start, first_row, state_row,
            RATIO, ROWS, SLOTS, STEP, OVERLAP, DIM, PAD,
        )  # fmt: skip
        x = x.to(DT).to(tl.float32)[None, :]
        slot = entry_slot(table, table_width, seq, position // RATIO, page_entries)
        finish_entry(
            x, norm, frequencies, position + 1 - RATIO, eps, data, tail, scale, slot,
            FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
        )  # fmt: skip
    if APPEND:
        _remember(
            values, gates, ape, state_v, state_z, row, position, state_row,
            RATIO, ROWS, WIDTH, WPAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def _close_kernel(
    values, gates, ape, norm, frequencies, state_v, state_z, positions, seq_idx, first_rows,
    starts, slots, table, table_width, page_entries, eps, data, tail, scale, num_rows,
    RATIO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    SCALES: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROPE: tl.constexpr,
    DT: tl.constexpr
):  # fmt: skip
    """GROUP 1: the token is also added to the state."""
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    known = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int32)
    is_wanted = (rows < num_rows) & (known >= 0) & ((GROUP == 1) | ((known + 1) % RATIO == 0))
    rank = tl.cumsum(is_wanted.to(tl.int32))
    for number in tl.range(0, tl.max(rank)):
        is_next = is_wanted & (rank == number + 1)
        row = tl.max(tl.where(is_next, rows, 0))
        position = tl.max(tl.where(is_next, known, 0))
        seq = tl.load(seq_idx + row).to(tl.int64)
        state_row = tl.load(slots + seq).to(tl.int64) * ROWS
        start = tl.load(starts + seq).to(tl.int32)
        first_row = tl.load(first_rows + seq).to(tl.int64)
        close_block(
            values, gates, ape, norm, frequencies, state_v, state_z, row, position, seq, start,
            first_row, state_row, table, table_width, page_entries, eps, data, tail, scale,
            RATIO, ROWS, SLOTS, STEP, OVERLAP, WIDTH, WPAD, GROUP == 1,
            FORMAT, NOPE, DIM, PAD, SCALES, LOG, FACTOR, ROPE, DT,
        )  # fmt: skip


@triton.jit
def _keep_token(
    values, gates, ape, kept_v, kept_z, row, position, kept_row,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr,
):  # fmt: skip
    """Store the first half of a token's channels in a row of its cached prefix."""
    column = tl.arange(0, WPAD // 2)
    live = column < WIDTH // 2
    v = tl.load(values + row * WIDTH + column, mask=live, other=0.0)
    z = tl.load(gates + row * WIDTH + column, mask=live, other=0.0)
    z += tl.load(ape + (position % RATIO) * WIDTH + column, mask=live, other=0.0)
    tl.store(kept_v + kept_row * (WIDTH // 2) + column, v, mask=live)
    tl.store(kept_z + kept_row * (WIDTH // 2) + column, z, mask=live)


@triton.jit
def _append_kernel(
    values, gates, ape, state_v, state_z, first_rows, starts, ends, slots,
    keep_ends, keep_rows, kept_v, kept_z,
    RATIO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WPAD: tl.constexpr
):  # fmt: skip
    """One of a sequence's newest tokens, in descending order. The remaining programs store the
    RATIO tokens before a boundary that is kept."""
    seq = tl.program_id(0)
    start = tl.load(starts + seq).to(tl.int32)
    first_row = tl.load(first_rows + seq).to(tl.int64)
    if tl.program_id(1) < ROWS:
        position = tl.load(ends + seq).to(tl.int32) - 1 - tl.program_id(1)
        if position >= start:
            state_row = tl.load(slots + seq).to(tl.int64) * ROWS
            _remember(
                values, gates, ape, state_v, state_z, first_row + position - start,
                position, state_row, RATIO, ROWS, WIDTH, WPAD,
            )  # fmt: skip
    else:
        end = tl.load(keep_ends + seq).to(tl.int32)
        place = tl.program_id(1) - ROWS
        position = end - RATIO + place
        if end > 0:
            _keep_token(
                values, gates, ape, kept_v, kept_z, first_row + position - start, position,
                tl.load(keep_rows + seq).to(tl.int64) * RATIO + place, RATIO, WIDTH, WPAD,
            )  # fmt: skip


def state_sizes(ratio, values, state) -> dict[str, int]:
    width = values.shape[1]
    return {
        "RATIO": ratio,
        "ROWS": state.rows,
        "WIDTH": width,
        "WPAD": triton.next_power_of_2(width),
    }


def block_sizes(ratio) -> dict[str, int]:
    overlap = ratio == 4
    return {
        "SLOTS": 2 * ratio if overlap else ratio,
        "STEP": STEP,
        "OVERLAP": overlap,
    }


def supports(
    values, gates, ape, norm, frequencies, eps, ratio, dtype, state, batch, pool, table
) -> str | None:
    tensors = {"values": values, "gates": gates, "ape": ape, "state": state.values}
    for name, tensor in (*tensors.items(), ("state gates", state.gates)):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous fp32"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"entries rounded to {dtype}, kernels know bfloat16 and float32"
    if 2 * frequencies.shape[0] > pool.dim:
        return f"{frequencies.shape[0]} frequencies for entries of {pool.dim}"
    return (
        device_reason(values.device)
        or pool_reason(pool)
        or index_tensors_reason(
            table=table, positions=batch.positions, seq_idx=batch.seq_idx, slots=batch.slots
        )
    )


def run(
    values, gates, ape, norm, frequencies, eps, ratio, dtype, state, batch, pool, table
) -> None:
    at_once = batch.appends_at_once
    sizes = state_sizes(ratio, values, state)
    group = 1 if at_once else GROUP
    _close_kernel[(triton.cdiv(batch.num_tokens, group),)](
        values,
        gates,
        ape,
        norm,
        frequencies,
        state.values,
        state.gates,
        batch.positions,
        batch.seq_idx,
        batch.first_rows,
        batch.starts,
        batch.slots,
        table,
        table.shape[1],
        pool.page_entries,
        eps,
        *pool_tensors(pool),
        batch.num_tokens,
        **sizes,
        **block_sizes(ratio),
        **pool_constants(pool),
        GROUP=group,
        ROPE=2 * frequencies.shape[0],
        DT=tl_dtype(dtype),
        **launch_options(ROW_WARPS),
    )
    if not at_once:
        keep, starts = batch.keep, batch.starts
        keeps = keep is not None and state.kept_values is not None
        _append_kernel[(starts.shape[0], state.rows + (ratio if keeps else 0))](
            values,
            gates,
            ape,
            state.values,
            state.gates,
            batch.first_rows,
            batch.starts,
            batch.ends,
            batch.slots,
            *((keep.ends, keep.rows) if keeps else (starts, starts)),
            *((state.kept_values, state.kept_gates) if keeps else (values, gates)),
            **sizes,
            **launch_options(ROW_WARPS),
        )
