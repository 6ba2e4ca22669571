# mypy: ignore-errors
"""`verify` on a GPU: one program; a vector over sequences, a loop over their rows."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.arguments import leaves
from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, device_reason
from dsv4.ops.sample.verify import PLACES


@triton.jit
def _store_for_all(to, value, real, seq, inside):
    """What has no rows repeats the first."""
    first = tl.sum(tl.where(seq == 0, value, 0))
    tl.store(to + seq, tl.where(real, value, first), mask=inside)


@triton.jit
def _verify_kernel(
    tokens, inputs, first_rows, starts, ends, slots, counts, newest, lengths, follows, stride,
    num_sequences, WIDTH: tl.constexpr, PAD: tl.constexpr, PLACES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    seq = tl.arange(0, PAD)
    inside = seq < num_sequences
    first = tl.load(first_rows + seq, mask=inside, other=0)
    start = tl.load(starts + seq, mask=inside, other=0)
    limit = tl.load(ends + seq, mask=inside, other=0) - start
    slot = tl.load(slots + seq, mask=inside, other=0)
    real = inside & (limit > 0)
    count = real.to(tl.int64)
    right = real
    for place in tl.static_range(1, WIDTH):
        live = right & (place < limit)
        drawn = tl.load(tokens + first + place - 1, mask=live, other=-1)
        right = live & (tl.load(inputs + first + place, mask=live, other=-2) == drawn)
        count += right.to(tl.int64)
    tl.store(counts + seq, count, mask=inside)
    row = tl.maximum(first + count - 1, 0)
    position = tl.maximum(start + count - 1, 0)
    token = tl.load(tokens + row, mask=inside, other=0)
    tl.store(newest + slot, token, mask=real)
    tl.store(lengths + slot, start + count, mask=real)
    _store_for_all(follows, row, real, seq, inside)
    _store_for_all(follows + stride, slot, real, seq, inside)
    _store_for_all(follows + 2 * stride, token, real, seq, inside)
    for place in tl.static_range(0, PLACES):
        _store_for_all(follows + (3 + place) * stride, position + place, real, seq, inside)


def supports(rows) -> str | None:
    for name, tensor in leaves(rows):
        dense = tensor.stride(-1) == 1 if name.endswith("follows") else tensor.is_contiguous()
        if tensor.dtype != torch.int64 or not dense:
            return f"{tensor.dtype} with strides {tensor.stride()}, kernels read contiguous int64"
    return device_reason(rows.tokens.device)


def run(rows) -> None:
    sequences = rows.first_rows.shape[0]
    _verify_kernel[(1,)](
        rows.tokens, rows.inputs, rows.first_rows, rows.starts, rows.ends, rows.slots, rows.counts,
        rows.newest, rows.lengths, rows.follows, rows.follows.stride(0), sequences,
        WIDTH=rows.width, PAD=triton.next_power_of_2(sequences), PLACES=PLACES,
        **dependent_options(rows.tokens.device, 4),
    )  # fmt: skip
