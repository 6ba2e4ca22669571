# mypy: ignore-errors
"""`own_experts` on a GPU: one small launch."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import device_reason, launch_options

BLOCK = 256


@triton.jit(do_not_specialize=["first", "count", "num"])
def _own_kernel(experts, local, first, count, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < num, other=-1) - first
    held = (expert >= 0) & (expert < count)
    tl.store(local + at, tl.where(held, expert, -1), mask=at < num)


def supports(experts, held) -> str | None:
    if experts.dtype != torch.int64 or not experts.is_contiguous():
        return f"experts are {experts.dtype} with strides {experts.stride()}"
    return device_reason(experts.device)


def run(experts, held):
    local = torch.empty_like(experts)
    num = experts.numel()
    if num:
        _own_kernel[(triton.cdiv(num, BLOCK),)](
            experts, local, held.start, len(held), num, BLOCK=BLOCK, **launch_options(1)
        )
    return local
