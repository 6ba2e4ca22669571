"""Which kernel, fusion or reference serves each op, by step shape.

`Op` and `Fusion` decide when a shape is compiled, and a graph fixes that decision; this is the
readable record of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from dsv4.ops.core.context import record
from dsv4.runner.step.shape import StepShape


@dataclass(frozen=True)
class DraftPart:
    """A part that drafting adds to a step of this shape: sampling all rows of a verify step, a
    drafter's keys for the step's tokens, or its drafts (`width` per sequence); or a verify step
    with all of these, up to `num_drafts` drafts for the next."""

    kind: Literal["verify sampling", "draft keys", "drafts", "whole step"]
    shape: StepShape
    num_drafts: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.shape}"


# a model step of this shape, the sampling of this many rows, or what drafting adds
Planned = StepShape | int | DraftPart
SHARE = "share"  # the part of a step that sends its tokens to all ranks
GraphKey = Planned | str
_KINDS = (
    "decode", "prompt", "score", "verify", "sampling", "verify sampling", "draft keys", "drafts",
)  # fmt: skip


class StepPlan:
    def __init__(self) -> None:
        # layers differ, so several may serve one op
        self.served: dict[Planned, dict[str, tuple[str, ...]]] = {}

    @contextmanager
    def recording(self, key: Planned) -> Iterator[None]:
        """Attribute everything inside the block to a step or sampling of this shape."""
        found: dict[str, dict[str, None]] = {}
        with record(lambda op, server: found.setdefault(op, {}).setdefault(server)):
            yield
        self.served[key] = {op: tuple(servers) for op, servers in found.items()}

    def summary(self) -> list[str]:
        """One line per range of shapes: what serves which ops there; widest range first."""
        where: dict[tuple[str, str], set[Planned]] = {}
        for key, ops in self.served.items():
            for op, servers in ops.items():
                for server in servers:
                    where.setdefault((server, op), set()).add(key)
        ranges: dict[frozenset[Planned], dict[str, list[str]]] = {}
        for (server, op), keys in where.items():
            ranges.setdefault(frozenset(keys), {}).setdefault(server, []).append(op)
        lines = []
        for shapes, by in sorted(ranges.items(), key=lambda item: -len(item[0])):
            texts = [f"{', '.join(names)} by {server}" for server, names in by.items()]
            lines.append(f"{self._text(shapes)}: {'; '.join(texts)}")
        return lines

    def _text(self, keys: frozenset[Planned]) -> str:
        steps = {key for key in self.served if isinstance(key, StepShape)}
        if steps and keys == steps:
            return "every step"
        texts = []
        for kind in _KINDS:
            whole = {key for key in self.served if _kind(key) == kind}
            some = whole & keys
            if some and some == whole:
                texts.append(f"every {kind}")
            elif some:
                texts.append(f"{kind} {_ranges(some, whole)}")
        return ", ".join(texts)


def _kind(key: Planned) -> str:
    return "sampling" if isinstance(key, int) else key.kind


def _size(key: Planned) -> tuple[int, int]:
    """Context and rows."""
    if isinstance(key, int):
        return 0, key
    return (key.context, key.tokens) if isinstance(key, StepShape) else (0, key.shape.tokens)


def _ranges(some: set[Planned], whole: set[Planned]) -> str:
    """Rows of `some`, with their contexts where these differ."""
    sizes = sorted({rows for _, rows in map(_size, whole)})
    contexts = sorted({context for context, _ in map(_size, whole)})
    found: dict[str, list[int]] = {}
    for context in contexts:
        rows = [rows for at, rows in sorted(map(_size, some)) if at == context]
        if rows:
            found.setdefault(_runs(rows, sizes), []).append(context)
    if len(found) == 1 and next(iter(found.values())) == contexts:
        return f"of {next(iter(found))} rows"
    return " and ".join(
        f"of {rows} rows at context {_runs(at, contexts)}" for rows, at in found.items()
    )


def _runs(values: Sequence[int], sizes: Sequence[int]) -> str:
    """Ascending `values` as ranges of adjacent `sizes`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and sizes.index(value) == sizes.index(runs[-1][-1]) + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
