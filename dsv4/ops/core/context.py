"""The context of op calls: an engine's settings and buffers, and settings of `with` blocks.

Engines in one process share nothing here: each activates its own `EngineOps` around its steps, and
a `with` block affects only the calls inside it, on its thread.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4.errors import OptionError

# called in place of an op with (op, arguments, call); returns the result of `call()`
Observer = Callable[[Any, dict[str, Any], Callable[[], Any]], Any]
OpRecorder = Callable[[str, str], None]  # an op, and the kernel, fusion or reference that serves it


@dataclass(frozen=True, eq=False)
class EngineOps:
    """An engine's choice of references, and what its kernels keep between launches."""

    forced: frozenset[str] | None = frozenset()  # ops that run their reference; None: all
    buffers: dict[tuple[torch.device, str], torch.Tensor] = field(default_factory=dict)
    frozen: set[torch.device] = field(default_factory=set)  # graphs hold addresses of buffers
    outgrown: list[torch.Tensor] = field(default_factory=list)  # graphs hold their addresses
    warned: set[str] = field(default_factory=set)
    scratch: threading.local = field(default_factory=threading.local)  # of few rows on a CPU

    def active(self) -> AbstractContextManager[None]:
        """Ops inside the block belong to this engine."""
        return changed(engine=self)

    @property
    def forces_any(self) -> bool:
        return self.forced is None or len(self.forced) > 0

    def forces_reference(self, op: str) -> bool:
        return self.forced is None or op in self.forced


@dataclass(frozen=True)
class OpContext:
    engine: EngineOps
    strict: bool = False  # falling back to a reference raises
    kernels_on_cpu: bool = False  # for Triton's interpreter, which works on CPU tensors
    compiling: bool = False  # launches only compile
    assumed: Any = None  # the Gpu to choose for when on a CPU, see gpu.py
    observer: Observer | None = None
    recorder: OpRecorder | None = None

    def tell(self, ops: tuple[str, ...], server: Callable[[], str]) -> None:
        if self.recorder is not None:
            for op in ops:
                self.recorder(op, server())


_context = ContextVar("op context", default=OpContext(EngineOps()))  # noqa: B039 - outside engines
current = _context.get


@contextmanager
def changed(**values: Any) -> Iterator[None]:
    token = _context.set(replace(current(), **values))
    try:
        yield
    finally:
        _context.reset(token)


def forced_references(choice: str, known: Iterable[str]) -> frozenset[str] | None:
    """The ops that `EngineConfig.ops` forces to their reference; `auto` defers to DSV4_OPS."""
    if choice == "auto":
        choice = os.environ.get("DSV4_OPS", "auto")
    if choice == "auto":
        return frozenset()
    if choice == "reference":
        return None
    names = frozenset(name.strip() for name in choice.split(","))
    unknown = sorted(names - set(known))
    if unknown:
        raise OptionError(
            f"ops names {unknown[0]!r}; expected auto, reference, or some of "
            f"{', '.join(sorted(known))}"
        )
    return names


def observe(observer: Observer) -> AbstractContextManager[None]:
    """Pass every op call inside the block to `observer`; `doctor` compares results this way."""
    return changed(observer=observer)


def record(recorder: OpRecorder) -> AbstractContextManager[None]:
    """Report to `recorder` what serves each op inside the block; fusions stay enabled."""
    return changed(recorder=recorder)


def kernels_only() -> AbstractContextManager[None]:
    """Strict mode: inside the block an op without a kernel for its arguments raises on a GPU."""
    return changed(strict=True)


def kernels_on_cpu() -> AbstractContextManager[None]:
    """`kernels_only`, on CPU tensors too: for the interpreter and compilers."""
    return changed(strict=True, kernels_on_cpu=True)
