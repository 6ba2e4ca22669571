"""Launch options, and the reasons why a kernel cannot run on a device."""

import os

import torch

from dsv4.ops.core.gpu import describe

STREAMING = 90  # where kernels start early and weights stream (gemm/variants/stream_gluon.py)
ROW_WARPS = 4  # for programs that sum along a row; the same standalone and fused


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_reason(device: torch.device) -> str | None:
    """Why no kernel runs on `device`, or None."""
    if interpreting():
        return None
    if device.type != "cuda":
        return f"kernels need a CUDA device, found {device}"
    return describe(device).reason


def rows_reason(x: torch.Tensor, *dtypes: torch.dtype) -> str | None:
    """Why kernels do not read rows `x` of these types, by default bfloat16, or None."""
    if x.dtype in (dtypes or (torch.bfloat16,)) and x.stride(-1) == 1:
        return None
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "bfloat16"
    return f"x is {x.dtype} with strides {x.stride()}, kernels read {names} rows"


def native_reason(device: torch.device) -> str | None:
    """Why block-scaled products do not run on `device`, or None."""
    reason = device_reason(device)
    if reason is not None or interpreting() or describe(device).scales_blocks:
        return reason
    found = describe(device).architecture
    return f"sm_{found} has no block-scaled products, sm_100 and sm_120 have"


def a8_reason(device: torch.device) -> str | None:
    """Why FP8 products that all have the same bits (`wgmma`) do not run on `device`, or None."""
    reason = device_reason(device)
    if reason is not None or interpreting() or describe(device).products == "wgmma":
        return reason
    return f"sm_{describe(device).architecture} has no wgmma, sm_90 has"


def launch_options(num_warps: int, num_stages: int = 1, **others: object) -> dict[str, object]:
    if interpreting():
        return {}
    return {"num_warps": num_warps, "num_stages": num_stages, **others}


def streams(device: torch.device) -> bool:
    """Whether to use the Hopper kernels for few rows."""
    if interpreting() or device.type != "cuda":
        return False
    return describe(device).architecture == STREAMING


def dependent_options(
    device: torch.device, num_warps: int, num_stages: int = 1, *, early: bool = True
) -> dict[str, object]:
    """`launch_options` for a kernel that calls `depend`; `early`: it may start before the previous
    launch is complete."""
    if interpreting():
        return {"DEPENDENT": False}
    early = early and streams(device)
    options = launch_options(num_warps, num_stages, DEPENDENT=early)
    return options | {"launch_pdl": True} if early else options
