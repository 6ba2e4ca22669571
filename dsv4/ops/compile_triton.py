# mypy: ignore-errors
"""When kernels are compiled: all ahead of time, side by side, and noticed when not."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import triton
from triton.runtime.jit import JITFunction

_compiling: list[bool] = []


@contextmanager
def compile_only(workers: int):
    """Launches inside compile their kernel, several side by side, and run nothing.

    What such a launch would have written holds anything: only kernels may read it. A kernel that
    does not compile is left to the real launch, which says so.
    """
    run = JITFunction.run

    def warm(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = warm
    _compiling.append(True)
    try:
        executor = ThreadPoolExecutor(workers)
        with executor, triton.AsyncCompileMode(executor, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
        _compiling.pop()


def compiling() -> bool:
    """Whether launches only compile."""
    return bool(_compiling)


def watch_compiles(seen) -> None:
    """Call `seen(name)` before a kernel is compiled or loaded anew; None ends that."""
    hook = None if seen is None else (lambda **facts: seen(facts["fn"].name))
    triton.knobs.runtime.jit_cache_hook = hook
