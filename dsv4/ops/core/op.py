"""The registry: an op is its PyTorch reference; kernels register against it.

On a CPU the reference runs. On a GPU the first kernel that supports the arguments runs; where
none does, the reference runs with one warning that names the op and the reason, or strict mode
(`kernels_only`) raises. `DSV4_OPS` (or `EngineConfig.ops`) forces ops to their reference for
bisection: `reference` for all of them, or a comma list of names.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from dsv4.errors import KernelError, OptionError

log = logging.getLogger(__name__)

Arguments = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """Inputs for one op, generated from a seed, and the tolerance of a kernel.

    A kernel passes when |kernel - reference| <= atol + rtol * |reference| everywhere.
    """

    name: str
    build: Callable[[torch.Generator], Arguments]
    atol: float = 1e-5
    rtol: float = 1e-5
    small: bool = True  # small enough for Triton's interpreter


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel of an op, imported on its first use on a GPU or in the interpreter.

    `module` defines `supports(**arguments) -> str | None` (None means yes, a text says why not)
    and `run(**arguments)`; `variant(**arguments)` names what it chooses by size, if it does.
    """

    module: str

    @cached_property
    def _loaded(self) -> Any:
        return importlib.import_module(self.module)

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def supports(self, arguments: Arguments) -> str | None:
        reason: str | None = self._loaded.supports(**arguments)
        return reason

    def run(self, arguments: Arguments) -> Any:
        return self._loaded.run(**arguments)

    def label(self, arguments: Arguments) -> str:
        """The kernel with the variant it runs for these arguments."""
        variant = getattr(self._loaded, "variant", None)
        return self.name if variant is None else f"{self.name} ({variant(**arguments)})"


@dataclass(frozen=True)
class Op:
    name: str
    reference: Callable[..., Any]
    cases: Callable[[], Iterable[Case]]
    kernels: tuple[Kernel, ...] = ()
    mutates: tuple[str, ...] = ()  # arguments written in place
    _warned: set[str] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, device: torch.device, **arguments: Any) -> Any:
        """The public function has checked the arguments; an observer may wrap the call."""
        if _policy.observer is None:
            return self.run(device, arguments)
        return _policy.observer(self, arguments, lambda: self.run(device, arguments))

    def run(self, device: torch.device, arguments: Arguments) -> Any:
        """Run the kernel or reference that the policy selects on `device`."""
        on_cpu = device.type == "cpu" and not _policy.kernels_on_cpu
        if on_cpu or _policy.forces_reference(self.name):
            return self._run_reference(arguments)
        reasons = []
        for kernel in self.kernels:
            reason = kernel.supports(arguments)
            if reason is None:
                _policy.tell((self.name,), partial(kernel.label, arguments))
                return kernel.run(arguments)
            reasons.append(reason)
        self._fall_back("; ".join(reasons) or "no kernel is written yet", device)
        return self._run_reference(arguments)

    def _run_reference(self, arguments: Arguments) -> Any:
        _policy.tell((self.name,), lambda: "reference")
        return self.reference(**arguments)

    def _fall_back(self, reason: str, device: torch.device) -> None:
        message = f"op {self.name} runs its slow reference on {device}: {reason}"
        if _policy.strict or reason not in self._warned:
            self._warned.add(reason)
            warn_unless_strict(message)


@dataclass(frozen=True)
class Fusion:
    """Several ops in one launch where a kernel supports that; otherwise they run one by one.

    The results are equal bit for bit. Not used where an op is observed or forced to its reference.
    """

    parts: tuple[str, ...]  # names of ops
    kernel: Kernel
    reader: str = ""  # an op whose kernel alone can consume the result

    def __call__(
        self, device: torch.device, arguments: Arguments, one_by_one: Callable[[], Result]
    ) -> Result:
        if not self.accepts(device, arguments):
            return one_by_one()
        result: Result = self.run(arguments)
        return result

    def accepts(self, device: torch.device, arguments: Arguments) -> bool:
        if device.type == "cpu" and not _policy.kernels_on_cpu:
            return False
        needed = (*self.parts, self.reader)
        if _policy.observer is not None or any(map(_policy.forces_reference, needed)):
            return False
        return self.kernel.supports(arguments) is None

    def run(self, arguments: Arguments) -> Any:
        _policy.tell(self.parts, partial(self.kernel.label, arguments))
        return self.kernel.run(arguments)


# called instead of an op with its arguments; it calls its third argument and returns that result
Observer = Callable[[Op, Arguments, Callable[[], Any]], Any]
Recorder = Callable[[str, str], None]  # an op, and the kernel, fusion or reference that serves it


class _Policy:
    """Which ops are forced to their reference in this process, and whether fallbacks raise."""

    def __init__(self) -> None:
        self.names: frozenset[str] | None = frozenset()  # None: all of them
        self.strict = False
        self.kernels_on_cpu = False  # for Triton's interpreter, which works on CPU tensors
        self.observer: Observer | None = None
        self.recorder: Recorder | None = None

    def forces_reference(self, name: str) -> bool:
        return self.names is None or name in self.names

    def tell(self, ops: tuple[str, ...], server: Callable[[], str]) -> None:
        if self.recorder is not None:
            for op in ops:
                self.recorder(op, server())


_policy = _Policy()


def choose_ops(choice: str, known: Iterable[str]) -> None:
    """Set the policy from `EngineConfig.ops`; `auto` defers to the variable DSV4_OPS."""
    if choice == "auto":
        choice = os.environ.get("DSV4_OPS", "auto")
    if choice == "auto":
        _policy.names = frozenset()
    elif choice == "reference":
        _policy.names = None
    else:
        names = frozenset(name.strip() for name in choice.split(","))
        unknown = sorted(names - set(known))
        if unknown:
            raise OptionError(
                f"ops names {unknown[0]!r}; expected auto, reference, or some of "
                f"{', '.join(sorted(known))}"
            )
        _policy.names = names


def warn_unless_strict(message: str) -> None:
    """Warn that something runs differently than requested or possible; strict mode raises."""
    if _policy.strict:
        raise KernelError(f"{message}; strict mode forbids that")
    log.warning(message)


@contextmanager
def _changed(**values: Any) -> Iterator[None]:
    """Change the policy inside the block."""
    before = {name: getattr(_policy, name) for name in values}
    vars(_policy).update(values)
    try:
        yield
    finally:
        vars(_policy).update(before)


def observe(observer: Observer) -> AbstractContextManager[None]:
    """Show every op call inside the block to `observer`; `doctor` compares them."""
    return _changed(observer=observer)


def record(recorder: Recorder) -> AbstractContextManager[None]:
    """Report to `recorder` what serves each op inside the block; fusions stay enabled."""
    return _changed(recorder=recorder)


def kernels_only() -> AbstractContextManager[None]:
    """Strict mode: inside the block an op without a kernel for its arguments raises on a GPU."""
    return _changed(strict=True)


def kernels_on_cpu() -> AbstractContextManager[None]:
    """`kernels_only`, on CPU tensors too: for the interpreter and compilers."""
    return _changed(strict=True, kernels_on_cpu=True)


def check(condition: bool, op: str, message: str | Callable[[], str]) -> None:
    """Argument check of an op: found and expected, before anything runs.

    A message with numbers in it is a function, called only if the check fails.
    """
    if not condition:
        raise KernelError(f"{op}: {message if isinstance(message, str) else message()}")


def check_shape(op: str, name: str, tensor: Any, *expected: int | str) -> None:
    """`expected`: the size of each dimension, or its name where any size is right."""
    found = tuple(tensor.shape)
    pairs = zip(found, expected, strict=False)
    if len(found) != len(expected) or any(n != m for n, m in pairs if not isinstance(m, str)):
        wanted = ", ".join(map(str, expected))
        raise KernelError(f"{op}: {name} has shape {found}, expected [{wanted}]")
