# mypy: ignore-errors
"""`accept` on a GPU: one program per row."""

import torch
import triton
import triton.language as tl

from dsv4.ops.device import device_reason, launch_options


@triton.jit
def _accept_kernel(
    tokens, logits, norms, token_ids, positions, ends, chosen, size
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    token = tl.minimum(tl.maximum(token, 0), size - 1)  # a row of NaN has no best token
    tl.store(token_ids + row, token)
    tl.store(chosen + row, tl.load(logits + row * size + token) - tl.load(norms + row))
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(ends + row, tl.load(ends + row) + 1)


def supports(tokens, logits, norms, target) -> str | None:
    if not logits.is_contiguous():
        return f"logits has strides {logits.stride()}, kernels need it contiguous"
    for name in ("token_ids", "positions", "ends"):
        tensor = getattr(target, name)
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous int64"
    return device_reason(tokens.device)


def run(tokens, logits, norms, target) -> None:
    _accept_kernel[(tokens.shape[0],)](
        tokens, logits, norms, target.token_ids, target.positions, target.ends, target.chosen,
        logits.shape[1], **launch_options(1),
    )  # fmt: skip
