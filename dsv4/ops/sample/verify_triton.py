# mypy: ignore-errors
"""`verify` on a GPU: one program per sequence."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.arguments import leaves
from dsv4.ops.core.launch import device_reason, launch_options


@triton.jit
def _verify_kernel(
    tokens, inputs, first_rows, starts, ends, slots, counts, newest, lengths, WIDTH: tl.constexpr
):
    seq = tl.program_id(0)
    first = tl.load(first_rows + seq)
    start = tl.load(starts + seq)
    limit = tl.load(ends + seq) - start
    count = limit * 0
    if limit > 0:
        count += 1
        right = limit > 1
        for place in tl.static_range(1, WIDTH):
            live = right & (place < limit)
            drawn = tl.load(tokens + first + place - 1, mask=live, other=-1)
            right = live & (tl.load(inputs + first + place, mask=live, other=-2) == drawn)
            count += right.to(tl.int64)
        slot = tl.load(slots + seq)
        tl.store(newest + slot, tl.load(tokens + first + count - 1))
        tl.store(lengths + slot, start + count)
    tl.store(counts + seq, count)


def supports(rows) -> str | None:
    for _, tensor in leaves(rows):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{tensor.dtype} with strides {tensor.stride()}, kernels read contiguous int64"
    return device_reason(rows.tokens.device)


def run(rows) -> None:
    _verify_kernel[(rows.first_rows.shape[0],)](
        rows.tokens, rows.inputs, rows.first_rows, rows.starts, rows.ends, rows.slots, rows.counts,
        rows.newest, rows.lengths, WIDTH=rows.width, **launch_options(1),
    )  # fmt: skip
