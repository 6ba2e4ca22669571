"""What is known of the GPU that kernels run on; choices by size follow from it."""

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def num_multiprocessors(device: torch.device) -> int:
    """They decide how many programs run at once. Without a GPU, where kernels are compiled or
    interpreted, as many as an H200 has."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
