# mypy: ignore-errors
"""`own_experts` on a GPU: one small launch."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import device_reason, launch_options

BLOCK = 512
MOST_RANKS = 8


@triton.jit(do_not_specialize=["first", "count", "num"])
def _own_kernel(
    experts, local, load, first, count, num, COUNTS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < num, other=-1)
    if COUNTS:  # one program has all pairs
        owner = tl.where(expert < 0, -1, expert // count)
        fullest = tl.sum((owner == 0).to(tl.int64))
        for rank in tl.static_range(1, RANKS):
            fullest = tl.maximum(fullest, tl.sum((owner == rank).to(tl.int64)))
        tl.store(load, tl.load(load) + fullest)
        tl.store(load + 1, tl.load(load + 1) + tl.sum((owner >= 0).to(tl.int64)))
    expert -= first
    held = (expert >= 0) & (expert < count)
    tl.store(local + at, tl.where(held, expert, -1), mask=at < num)


def supports(experts, held, load) -> str | None:
    if experts.dtype != torch.int64 or not experts.is_contiguous():
        return f"experts are {experts.dtype} with strides {experts.stride()}"
    if load is not None and experts.numel() > BLOCK:
        return f"{experts.numel()} pairs to count, kernels count up to {BLOCK}"
    return device_reason(experts.device)


def run(experts, held, load):
    local = torch.empty_like(experts)
    num = experts.numel()
    if num:
        _own_kernel[(triton.cdiv(num, BLOCK),)](
            experts, local, local if load is None else load, held.start, len(held), num,
            COUNTS=load is not None, RANKS=MOST_RANKS, BLOCK=BLOCK, **launch_options(1),
        )  # fmt: skip
    return local
