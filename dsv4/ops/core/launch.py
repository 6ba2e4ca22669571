"""The GPU that kernels run on, and the options of a launch."""

import os
from functools import lru_cache

import torch

MIN_CAPABILITY = (9, 0)
STREAMING = (9, 0)  # where kernels start early and weights stream (gemm/variants/stream_gluon.py)
ROW_WARPS = 4  # of a program that sums along a row; the same alone and in a fused kernel


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=8)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def device_capability(device: torch.device) -> tuple[int, int]:
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def device_reason(device: torch.device) -> str | None:
    """Why no kernel runs on `device`, or None."""
    if interpreting():
        return None
    if device.type != "cuda":
        return f"kernels need a CUDA device, found {device}"
    found = device_capability(device)
    if found < MIN_CAPABILITY:
        return f"compute capability {found[0]}.{found[1]}, kernels need 9.0 or newer"
    return None


def native_reason(device: torch.device) -> str | None:
    """Why block-scaled products do not run on `device`, or None."""
    reason = device_reason(device)
    if reason is not None or interpreting():
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == 10 else f"sm_{major}{minor} has no block-scaled products, sm_100 has"


@lru_cache(maxsize=8)
def num_multiprocessors(device: torch.device) -> int:
    """Determines how many programs run at once. Without a GPU, for compiling and interpreting
    kernels, that of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_options(num_warps: int, num_stages: int = 1, **others: object) -> dict[str, object]:
    if interpreting():
        return {}
    return {"num_warps": num_warps, "num_stages": num_stages, **others}


def streams(device: torch.device) -> bool:
    """Whether kernels for few rows are those of Hopper."""
    return not interpreting() and device.type == "cuda" and device_capability(device) == STREAMING


def dependent_options(
    device: torch.device, num_warps: int, num_stages: int = 1
) -> dict[str, object]:
    """`launch_options` of a kernel that calls `depend`."""
    if interpreting():
        return {"DEPENDENT": False}
    early = streams(device)
    options = launch_options(num_warps, num_stages, DEPENDENT=early)
    return options | {"launch_pdl": True} if early else options
