"""The registry: an op is its PyTorch reference; kernels register against it.

On a CPU the reference runs, or a faster variant with the same bits (`on_cpu`). On a GPU the first
kernel that supports the arguments runs; where none does, the reference runs with one warning that
names the op and the reason, or strict mode (`kernels_only`) raises. `DSV4_OPS` (or
`EngineConfig.ops`) forces ops to their reference for bisection: `reference` for all of them, or
comma-separated names.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dsv4.errors import KernelError
from dsv4.ops.core.arguments import argument
from dsv4.ops.core.context import current

log = logging.getLogger(__name__)

Arguments = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


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
    and `run(**arguments)`. If it chooses by size, `variant(**arguments)` names the choice, and
    `compile_others(**arguments)` launches the variants that other steps of this size may need: a
    warm-up calls it.
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
        if current().compiling and hasattr(self._loaded, "compile_others"):
            self._loaded.compile_others(**arguments)
        return self._loaded.run(**arguments)

    def label(self, arguments: Arguments) -> str:
        """The kernel's name and the variant it picks for these arguments."""
        variant = getattr(self._loaded, "variant", None)
        return self.name if variant is None else f"{self.name} ({variant(**arguments)})"


def _function(module: str, name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None
    found = getattr(importlib.import_module(module), name) if module else None
    return found


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """The reference's signature is the op's: mypy checks calls against it, and kernels take the
    same arguments. `on_cpu` names a module with a function of the op's name, with the reference's
    signature and bits but faster for few rows; it is imported on first use."""

    name: str
    reference: Callable[P, R]
    cases: Callable[[], Iterable[Case]]
    kernels: tuple[Kernel, ...] = ()
    mutates: tuple[str, ...] = ()  # paths of arguments written in place
    on_cpu: str = ""

    @cached_property
    def cpu_function(self) -> Callable[..., Any] | None:
        return _function(self.on_cpu, self.name)

    def __call__(self, device: torch.device, /, *_: P.args, **arguments: P.kwargs) -> R:
        """Arguments are keywords. The public function has checked them; an observer may wrap the
        call."""
        context = current()
        if context.observer is None:
            return self.run(device, arguments)
        result: R = context.observer(self, arguments, lambda: self.run(device, arguments))
        return result

    def run(self, device: torch.device, arguments: Arguments) -> R:
        """Run the kernel or reference that the context selects on `device`."""
        context = current()
        forced = context.engine.forces_reference(self.name)
        on_cpu = device.type == "cpu" and not context.kernels_on_cpu
        if on_cpu and not forced and self.cpu_function is not None:
            if context.recorder is not None:
                context.tell((self.name,), lambda: "cpu")
            faster: R = self.cpu_function(**arguments)
            return faster
        if forced or on_cpu:
            return self._run_reference(arguments)
        reasons = []
        for kernel in self.kernels:
            reason = kernel.supports(arguments)
            if reason is None:
                context.tell((self.name,), partial(kernel.label, arguments))
                result: R = kernel.run(arguments)
                return result
            reasons.append(reason)
        why = "; ".join(reasons) or "no kernel is written yet"
        message = f"op {self.name} runs its slow reference on {device}: {why}"
        warn_unless_strict(message, about=message)
        return self._run_reference(arguments)

    def written(self, arguments: Arguments) -> Arguments:
        """The arguments that a call writes in place, by path."""
        return {path: argument(arguments, path) for path in self.mutates}

    def _run_reference(self, arguments: Arguments) -> R:
        current().tell((self.name,), lambda: "reference")
        reference: Callable[..., R] = self.reference
        return reference(**arguments)


AnyOp = Op[..., Any]


@dataclass(frozen=True)
class Fusion(Generic[P, R]):
    """A function that runs several ops, in one launch where a kernel supports its arguments.

    The results are equal bit for bit. Not used where an op is observed or forced to its reference.
    The first argument has a `device`.
    """

    one_by_one: Callable[P, R]
    ops: tuple[str, ...]  # op names
    kernel: Kernel
    reader: str = ""  # an op whose kernel alone can consume the result
    on_cpu: str = ""  # as of an op, by the name of `one_by_one`; None for unsupported arguments

    @cached_property
    def cpu_function(self) -> Callable[..., Any] | None:
        return _function(self.on_cpu, self.one_by_one.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result = self.attempt(*args, **kwargs)
        return self.one_by_one(*args, **kwargs) if result is None else result

    def attempt(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The result of the kernel, or None if it does not support the arguments."""
        context, first = current(), args[0]
        device: torch.device = first.device  # type: ignore[attr-defined]
        if device.type == "cpu" and not context.kernels_on_cpu:
            function = self.cpu_function
            if function is None or context.observer is not None or context.engine.forces_any:
                return None
            faster: R | None = function(*args, **kwargs)
            if faster is not None:
                context.tell(self.ops, lambda: "cpu")
            return faster
        needed = (*self.ops, self.reader)
        if context.observer is not None or any(map(context.engine.forces_reference, needed)):
            return None
        arguments = dict(zip(self._names, args, strict=False), **kwargs)
        if self.kernel.supports(arguments) is not None:
            return None
        context.tell(self.ops, partial(self.kernel.label, arguments))
        result: R = self.kernel.run(arguments)
        return result

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.one_by_one).parameters)


def warn_unless_strict(message: str, about: str = "") -> None:
    """Warn that something runs differently than requested or possible, once per engine for each
    `about`; strict mode raises."""
    context = current()
    if context.strict:
        raise KernelError(f"{message}; strict mode forbids that")
    if not about or about not in context.engine.warned:
        context.engine.warned.add(about)
        log.warning(message)


def check(condition: bool, op: str, message: str | Callable[[], str]) -> None:
    """Check an op's arguments before anything runs; the message says what it found and expected.

    A message with numbers in it is a function, called only if the check fails.
    """
    if not condition:
        raise KernelError(f"{op}: {message if isinstance(message, str) else message()}")


def check_shape(op: str, name: str, tensor: Any, *expected: int | str) -> None:
    """`expected`: the size of each dimension, or its name if any size will do."""
    found = tensor.shape
    if len(found) == len(expected):
        for n, m in zip(found, expected, strict=True):
            if n != m and m.__class__ is not str:
                break
        else:
            return
    wanted = ", ".join(map(str, expected))
    raise KernelError(f"{op}: {name} has shape {tuple(found)}, expected [{wanted}]")
