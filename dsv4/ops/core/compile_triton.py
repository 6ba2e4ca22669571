# mypy: ignore-errors
"""Compiles kernels ahead of time in worker processes, and reports any compiled later.

Triton's front end is Python, so threads would run one at a time. A worker reads one line of JSON
per kernel (`describe`), compiles it into Triton's cache on disk and answers with one line: empty,
or the error. It needs no GPU and exits when its input ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from hashlib import sha256
from importlib import import_module

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_here
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from dsv4.ops.core.context import changed

_patching = threading.Lock()  # engines that start at the same time take turns
_watchers: ContextVar[tuple[list[str], ...]] = ContextVar("compile watchers", default=())


@contextlib.contextmanager
def compile_only(workers: int) -> Iterator[None]:
    """Launches inside the block only compile their kernels, in parallel, and run nothing. On exit
    the kernels are loaded, so launches can be captured.

    The outputs of such launches are undefined: only kernels may read them. If a kernel fails to
    compile, its real launch reports the error. Launches in other threads run as usual.
    """
    with _patching, changed(compiling=True):
        yield from _compile_only(workers)


def _compile_only(workers: int) -> Iterator[None]:
    run, launched, owner = JITFunction.run, {}, threading.get_ident()
    executor = CompileProcesses(workers)

    def warm(self, *args, grid, warmup, **kwargs):
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if self not in launched:
            self.device_caches[driver.active.get_current_device()]  # sets `compile`
            launched[self], self.compile = self.compile, executor.compile
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = warm
    try:
        with triton.AsyncCompileMode(executor, ignore_errors=True), executor:
            yield
        if torch.cuda.is_available():
            for function in launched:
                for kernel in function.device_caches[torch.cuda.current_device()][0].values():
                    kernel._init_handles()
    finally:
        JITFunction.run = run
        active_mode.set(None)  # Triton 3.6 forgets it if Ctrl-C comes while it waits
        for function, compile in launched.items():
            function.compile = compile


@contextlib.contextmanager
def watch_compiles() -> Iterator[list[str]]:
    """Names of the kernels that this thread's launches inside the block compile or load."""
    knobs = triton.knobs.compilation  # a launch hook fails on some tuples
    if not isinstance(knobs.listener, _Listener):
        knobs.listener = _Listener(knobs.listener)
    names: list[str] = []
    token = _watchers.set((*_watchers.get(), names))
    try:
        yield names
    finally:
        _watchers.reset(token)


class _Listener:
    """Triton's listener, of which a process has one: tells watchers and the listener before it."""

    def __init__(self, earlier) -> None:
        self._earlier = earlier

    def __call__(self, *, src, **facts) -> None:
        for names in _watchers.get():
            names.append(src.name)
        if self._earlier is not None:
            self._earlier(src=src, **facts)


class CompileProcesses(ThreadPoolExecutor):
    """Threads that call `compile`; each has its own process for kernels that are not on disk."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self._mine = threading.local()
        self._processes: list[subprocess.Popen[str]] = []

    def compile(self, source, target=None, options=None, **kwargs):
        """Like `triton.compile`, but loads from disk after a process has compiled the kernel."""
        if not _is_on_disk(source, target, options):
            # if the process cannot compile it, the call below does, and raises any error
            with contextlib.suppress(TypeError, OSError):
                self._ask(json.dumps(describe(source, target, options)))
        return compile_here(source, target=target, options=options, **kwargs)

    def _ask(self, line: str) -> None:
        process = getattr(self._mine, "process", None)
        if process is None:
            process = self._mine.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._processes.append(process)
        process.stdin.write(line + "\n")
        process.stdin.flush()
        process.stdout.readline()

    def __exit__(self, *error) -> None:
        self.shutdown(cancel_futures=error[0] is not None)
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            process.stdout.close()
            process.wait()


def describe(source, target, options) -> dict:
    """Everything another process needs to compile the same kernel."""
    function = source.fn
    if getattr(import_module(function.module), function.__name__, None) is not function:
        raise TypeError(f"{function.__name__} is not a name of its module")
    return {
        "module": function.module,
        "name": function.__name__,
        "signature": _encode(source.signature),
        "constants": _encode(source.constants),
        "attributes": _encode(source.attrs),
        "options": _encode(options),
        "target": [target.backend, target.arch, target.warp_size],
    }


def compile_described(facts: dict) -> None:
    function = getattr(import_module(facts["module"]), facts["name"])
    is_gluon = function.is_gluon()
    home = "triton.experimental.gluon._runtime" if is_gluon else "triton.compiler"
    kind = getattr(import_module(home), "GluonASTSource" if is_gluon else "ASTSource")
    signature, constants, attributes, options = (
        _decode(facts[name]) for name in ("signature", "constants", "attributes", "options")
    )
    source = kind(function, signature, constants, attributes)
    triton.compile(source, target=GPUTarget(*facts["target"]), options=options)


def _is_on_disk(source, target, options) -> bool:
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    entry = get_cache_manager(sha256(key.encode()).hexdigest())
    name = f"{source.name[:150]}.json"
    return name in (entry.get_group(name) or {})


def _encode(value):
    """The values that determine a kernel, as JSON that tells tuples from lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        items, kind = [_encode(item) for item in value], type(value)
        name = [kind.__module__, kind.__name__]
        return {"tuple": items} if kind is tuple else {"named": [*name, items]}
    if type(value) is list:
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value)}
    if isinstance(value, JITFunction):
        return {"function": [value.module, value.__name__]}
    raise TypeError(f"{type(value).__name__} in the description of a kernel")


def _decode(value):
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(_decode(item) for item in inner)
    if kind == "named":
        return getattr(import_module(inner[0]), inner[1])(*map(_decode, inner[2]))
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in inner}
    if kind == "dtype":
        return tl.dtype(inner)
    if kind == "constexpr":
        return tl.constexpr(_decode(inner))
    return getattr(import_module(inner[0]), inner[1])


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    answers = os.dup(1)
    os.dup2(2, 1)  # keeps compiler output out of the answers
    for line in sys.stdin:
        try:
            compile_described(json.loads(line))
            answer = ""
        except Exception as error:  # the parent compiles again and gets the same error
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(BrokenPipeError):  # the parent was killed: the input ends, too
            os.write(answers, f"{answer}\n".encode())


if __name__ == "__main__":
    _serve()
