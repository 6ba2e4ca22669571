# mypy: ignore-errors
"""`embed` on a GPU: a row is read once and written to every stream."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import device_reason, launch_options

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _embed_kernel(token_ids, table, out, size, STREAMS: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < size
    row = tl.maximum(tl.load(token_ids + token), 0).to(tl.int64)  # padding reads any row
    value = tl.load(table + row * size + column, mask=inside, other=0.0)
    for stream in tl.static_range(STREAMS):
        at = out + (token * STREAMS + stream) * size + column
        tl.store(at, value.to(out.dtype.element_ty), mask=inside)


def supports(token_ids, table, num_streams, dtype) -> str | None:
    if table.dtype not in DTYPES or dtype not in DTYPES or not table.is_contiguous():
        return f"table is {table.dtype} and the result {dtype}; expected contiguous floats"
    return device_reason(table.device)


def run(token_ids, table, num_streams, dtype):
    num_tokens, size = token_ids.shape[0], table.shape[1]
    out = torch.empty(num_tokens, num_streams, size, dtype=dtype, device=table.device)
    width = min(1024, triton.next_power_of_2(size))
    _embed_kernel[(num_tokens, triton.cdiv(size, width))](
        token_ids, table, out, size, STREAMS=num_streams, BN=width, **launch_options(4)
    )
    return out
