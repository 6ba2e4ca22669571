"""Checks that no step compiles a kernel or grows memory once the engine is ready.

Graph replays can do neither and are not checked. Steps that run one launch at a time are: each
violation is counted and logged as a warning. The strict mode, used by tests, raises a KernelError
instead, also where the host waits for the GPU.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch

from dsv4.errors import KernelError

log = logging.getLogger(__name__)


class CompileGuard:
    def __init__(self, device: torch.device, reserved: Callable[[], int] | None = None) -> None:
        """`reserved`: returns the bytes the allocator holds; by default the GPU's."""
        self.armed = False
        self.num_surprises = 0
        self._device = device
        self._reserved = reserved or self._gpu_bytes
        self._compiles: Callable[[], AbstractContextManager[list[str]]] = _no_compiles

    def arm(self) -> None:
        """The warm-up is over."""
        if find_spec("triton") is not None:
            from dsv4.ops.core.compile_triton import watch_compiles

            self._compiles = watch_compiles
        if self._device.type == "cuda":
            with warnings.catch_warnings():  # hides torch's notice that this API is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            torch.cuda.set_sync_debug_mode("default")
        self.armed = True

    @contextmanager
    def watch(self, *, strict: bool) -> Iterator[None]:
        if not self.armed:
            yield
            return
        before = self._reserved()
        with self._compiles() as compiled, self._no_waiting() if strict else nullcontext():
            yield
        complaints = [f"kernel {name} was compiled" for name in compiled]
        grown = self._reserved() - before
        if grown > 0:
            complaints.append(f"{grown} bytes of memory were added")
        if not complaints:
            return
        self.num_surprises += 1
        message = f"a step after the warm-up: {'; '.join(complaints)}"
        if strict:
            raise KernelError(f"{message}; the warm-up must cover this shape")
        log.warning("%s", message)

    @contextmanager
    def _no_waiting(self) -> Iterator[None]:
        """Make torch raise where the host would wait for the GPU."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise KernelError(f"the host waited for the GPU inside a step: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _gpu_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # cheaper than the flat one
        return int(stats["reserved_bytes"]["all"]["current"])


def _no_compiles() -> AbstractContextManager[list[str]]:
    return nullcontext([])


def numbered(name: str) -> torch.device:
    """The device with its index, as tensors report it: `cuda` is the current one."""
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)
