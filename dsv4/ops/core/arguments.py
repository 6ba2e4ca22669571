"""Traverses an op's arguments: tensors, or dataclasses and lists of tensors."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a value, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value):
        for item in fields(value):
            yield from leaves(getattr(value, item.name), f"{path}.{item.name}")
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from leaves(part, f"{path}[{place}]")


def argument(arguments: Any, path: str) -> Any:
    """The value at a path such as `block.state` in an op's arguments."""
    for name in path.split("."):
        arguments = arguments[name] if isinstance(arguments, dict) else getattr(arguments, name)
    return arguments


def changed_argument(arguments: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The arguments with the value at a path (`x`, `block.values`) replaced."""
    name, _, field = path.partition(".")
    return {**arguments, name: replace(arguments[name], **{field: value}) if field else value}


def copied(value: Any, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """A copy of the value with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value):
        parts = {f.name: copied(getattr(value, f.name), change) for f in fields(value) if f.init}
        kind: Any = type(value)
        return kind(**parts)
    if isinstance(value, dict):
        return {name: copied(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(part, change) for part in value)
    return value


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal; a NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )
