# mypy: ignore-errors
"""Ahead-of-time kernel compilation in parallel, and detection of later compilations."""

from contextlib import contextmanager

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dsv4.ops.compile_process_triton import CompileProcesses

_compiling: list[bool] = []


@contextmanager
def compile_only(workers: int):
    """Launches inside the block only compile their kernels, in parallel, and run nothing. At the
    end the kernels are loaded, so that launches can be captured.

    The outputs of such launches are undefined: only kernels may read them. A kernel that does not
    compile is left to the real launch, which reports the error.
    """
    run, launched = JITFunction.run, {}
    executor = CompileProcesses(workers)

    def warm(self, *args, grid, warmup, **kwargs):
        if self not in launched:
            self.device_caches[driver.active.get_current_device()]  # sets `compile`
            launched[self], self.compile = self.compile, executor.compile
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = warm
    _compiling.append(True)
    try:
        with executor, triton.AsyncCompileMode(executor, ignore_errors=True):
            yield
        if torch.cuda.is_available():
            for function in launched:
                for kernel in function.device_caches[torch.cuda.current_device()][0].values():
                    kernel._init_handles()
    finally:
        JITFunction.run = run
        for function, compile in launched.items():
            function.compile = compile
        _compiling.pop()


def compiling() -> bool:
    """Whether launches only compile."""
    return bool(_compiling)


def watch_compiles(seen) -> None:
    """Call `seen(name)` before a kernel is compiled or loaded; None stops that."""
    hook = None if seen is None else (lambda **facts: seen(facts["fn"].name))
    triton.knobs.runtime.jit_cache_hook = hook
