"""The result of a check: a readable line, and fields for programs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dsv4.errors import CheckpointError

Level = Literal["error", "warning", "note"]
_SHOWN = 10  # in an exception's message
_ALIKE = 8  # findings that differ only in layer and expert; above this, one stands for all


@dataclass(frozen=True)
class Finding:
    """`check` is a short stable name; `message` says what was found and what was expected."""

    level: Level
    check: str
    message: str
    tensor: str | None = None
    file: str | None = None
    cause: str | None = None

    def __str__(self) -> str:
        return self.line()

    def line(self) -> str:
        where = ": ".join(part for part in (self.file, self.tensor) if part)
        text = f"{where}: {self.message}" if where else self.message
        return f"{text} (likely cause: {self.cause})" if self.cause else text


def raise_errors(findings: Iterable[Finding], where: str) -> None:
    """Raise a CheckpointError with the first errors, if there are any."""
    errors = [item for item in findings if item.level == "error"]
    if not errors:
        return
    lines = [item.line() for item in errors[:_SHOWN]]
    more = len(errors) - len(lines)
    if more:
        lines.append(f"... and {more} more; `dsv4 check` lists them all")
    if len(lines) == 1:
        raise CheckpointError(f"{where}: {lines[0]}")
    raise CheckpointError(f"{where}: {len(errors)} problems\n  " + "\n  ".join(lines))


def collapse(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of one kind over many layers and experts into one with a count."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for item in findings:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", item.tensor or "")
        groups.setdefault((item.check, item.message, pattern), []).append(item)
    out = []
    for (_, _, pattern), group in groups.items():
        if len(group) <= _ALIKE:
            out += group
        else:
            text = f"{group[0].message} ({len(group)} like {pattern})"
            out.append(replace(group[0], message=text))
    return out
