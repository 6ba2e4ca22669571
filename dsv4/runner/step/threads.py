"""How many threads torch uses in a step on a CPU.

`torch.set_num_threads` changes the calling thread, and the default of threads that compute for the
first time later. So a thread that begins during a small model's step, which takes one thread, would
stay with one: its first step with another runner takes the count that the small step had found.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch


class StepThreads:
    _outside: ClassVar[int] = 1  # what the last small step of the process found

    def __init__(self, device: str, *, one: bool) -> None:
        self._device, self._one = device, one
        self._known = threading.local()  # the threads that have stepped

    def active(self) -> AbstractContextManager[None]:
        if self._device != "cpu":
            return nullcontext()
        if self._one:
            return _one_thread()
        if not hasattr(self._known, "count"):
            self._known.count = torch.get_num_threads()
            if self._known.count == 1 < StepThreads._outside:
                torch.set_num_threads(StepThreads._outside)
        return nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    if before == 1:  # a thread that began in a small step must not restore that as the default
        yield
        return
    StepThreads._outside = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
