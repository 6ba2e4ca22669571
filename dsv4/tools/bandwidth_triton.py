# mypy: ignore-errors
"""Only reads a large buffer: measures the bandwidth behind the floors."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import launch_options


@triton.jit
def _read_kernel(data, out, per_program, BLOCK: tl.constexpr):
    base = data + tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, per_program, BLOCK, num_stages=4):
        total += tl.load(base + start + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read(data: torch.Tensor, out: torch.Tensor) -> None:
    """Read int32 `data`; `out` `[programs]` int32 keeps the compiler from dropping it."""
    block, num_programs = 2048, out.numel()
    per_program = data.numel() // num_programs // block * block
    _read_kernel[(num_programs,)](data, out, per_program, BLOCK=block, **launch_options(4))
