# mypy: ignore-errors
"""`accept` on a GPU: one program per row."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, device_reason
from dsv4.ops.sample.sample_triton import EARLY_ROWS


@triton.jit
def _accept_kernel(
    tokens, logits, norms, slots, flags, newest, out, chosen, out_norms, seen, size,
    COUNTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    token = tl.minimum(tl.maximum(token, 0), size - 1)  # -1: no finite sum
    tl.store(out + row, token)
    norm = tl.load(norms + row)
    tl.store(out_norms + row, norm)
    tl.store(chosen + row, tl.load(logits + row * size + token) - norm)
    slot = tl.load(slots + row)
    if slot >= 0:
        tl.store(newest + slot, token)
        if COUNTS:
            at = seen + slot * size + token
            is_counted = (tl.load(flags + row) & 1) != 0
            tl.store(at, tl.load(at) + 1, mask=is_counted)


def supports(tokens, logits, norms, slots, flags, target) -> str | None:
    if not logits.is_contiguous():
        return f"logits has strides {logits.stride()}, kernels need it contiguous"
    for name, tensor in (("slots", slots), ("newest", target.newest), ("tokens", target.tokens)):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous int64"
    return device_reason(tokens.device)


def run(tokens, logits, norms, slots, flags, target) -> None:
    _accept_kernel[(tokens.shape[0],)](
        tokens, logits, norms, slots, flags, target.newest, target.tokens, target.chosen,
        target.norms, target.tokens if target.seen is None else target.seen, logits.shape[1],
        COUNTS=target.seen is not None,
        **dependent_options(tokens.device, 1, early=tokens.shape[0] <= EARLY_ROWS),
    )  # fmt: skip
