"""Facts about the GPU that kernels run on, which decide size-dependent choices."""

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def num_multiprocessors(device: torch.device) -> int:
    """Determines how many programs run at once. Without a GPU, for compiling and interpreting
    kernels, that of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
