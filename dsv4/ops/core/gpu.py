"""What a GPU offers kernels. Tiles, stages, warps and variants depend on it and on shapes."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from dsv4.errors import OptionError
from dsv4.ops.core.context import changed, current

log = logging.getLogger(__name__)

OLDEST = 80  # bf16 products, asynchronous copies
NEWEST = 121  # the newest one compiled for; later ones run portable variants

Products = Literal["mma", "wgmma", "tcgen05"]


@dataclass(frozen=True)
class Gpu:
    """`architecture` 90 is sm_90; 0 is Triton's interpreter, which uses the choices for sm_90."""

    architecture: int
    multiprocessors: int
    shared_per_block: int  # bytes available to one program
    shared_per_multiprocessor: int
    l2_bytes: int

    @property
    def products(self) -> Products:
        """The matrix instruction of a four-warp program. `mma` keeps operands and results in each
        warp's registers; the others read shared memory, and `tcgen05` writes tensor memory."""
        family = self.architecture // 10
        return "tcgen05" if family == 10 else "wgmma" if family in (0, 9) else "mma"

    @property
    def converts_fp8(self) -> bool:
        """Whether hardware converts E4M3; otherwise integer code does (helpers_device.py)."""
        return self.architecture == 0 or self.architecture >= 89

    @property
    def scales_blocks(self) -> bool:
        """Whether products take NVFP4, MXFP4 and MXFP8 operands with their scales."""
        return self.architecture // 10 in (0, 10, 12)

    @property
    def reason(self) -> str | None:
        """Why no kernel runs here, or None."""
        if 0 < self.architecture < OLDEST:
            return (
                f"sm_{self.architecture} has no bf16 products; kernels need sm_{OLDEST} (Ampere, "
                "2020) or newer; device=cpu runs the references"
            )
        return None

    @property
    def note(self) -> str | None:
        """What the user should know, or None."""
        if self.architecture in KNOWN or self.architecture < OLDEST:
            return None
        what = "portable variants, " if self.products == "mma" else ""
        return (
            f"sm_{self.architecture} is not among the architectures that kernels were compiled for "
            f"({', '.join(f'sm_{number}' for number in KNOWN)}): {what}dsv4 doctor --ops "
            "compares them with their references"
        )


# One GPU per architecture that kernels are compiled for; a GPU that is present is described by its
# driver. A100, RTX 3090, RTX 4090, H200, B200, RTX PRO 6000, DGX Spark
KNOWN: dict[int, Gpu] = {
    gpu.architecture: gpu
    for gpu in (
        Gpu(80, 108, 166912, 167936, 40 << 20),
        Gpu(86, 82, 101376, 102400, 6 << 20),
        Gpu(89, 128, 101376, 102400, 72 << 20),
        Gpu(90, 132, 232448, 233472, 60 << 20),
        Gpu(100, 148, 232448, 233472, 126 << 20),
        Gpu(120, 188, 101376, 102400, 128 << 20),
        Gpu(121, 48, 101376, 102400, 24 << 20),
    )
}
INTERPRETER = Gpu(0, 132, 232448, 233472, 60 << 20)


def describe(device: torch.device) -> Gpu:
    """The GPU behind `device`; for a CPU, the GPU that the context assumes for compiling and
    interpreting."""
    if device.type == "cuda":
        return _found(torch.cuda.current_device() if device.index is None else device.index)
    return current().assumed or INTERPRETER


def assume(gpu: Gpu) -> AbstractContextManager[None]:
    """Inside the block, choices on a CPU are made for this GPU."""
    return changed(assumed=gpu)


@lru_cache(maxsize=16)
def _found(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    return Gpu(
        10 * facts.major + facts.minor,
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        facts.shared_memory_per_multiprocessor,
        facts.L2_cache_size,
    )


def usable_device(device: str) -> str:
    """`device`, or the CPU if `auto` would pick a GPU that is too old. Warns about a GPU newer than
    the kernels know."""
    if device == "cpu" or not torch.cuda.is_available():
        return device
    found = describe(torch.device("cuda" if device == "auto" else device))
    if found.reason is not None and device != "auto":
        raise OptionError(f"device is {device!r}: {found.reason}")
    if found.reason is not None:
        log.warning("the CPU is used: %s", found.reason)
        return "cpu"
    if found.note is not None:
        log.warning("%s", found.note)
    return device
