"""All findings as one object that can be printed or written as JSON."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.tools.doctor.check import GridCell
from dsv4.tools.doctor.device.all_ops import coverage, summarize
from dsv4.tools.doctor.device.machine import Machine
from dsv4.tools.doctor.device.ops import OpResult
from dsv4.tools.doctor.examine import ModelReport
from dsv4.tools.doctor.redact import private_words, scrub

NEXT = (
    "Attach this file to an issue of the project: it says which kernels ran on this GPU, how far "
    "they are from their references and how long they took. It holds no names, paths or texts."
)


@dataclass
class DoctorReport:
    machine: Machine
    ops: list[OpResult] = field(default_factory=list)
    model: ModelReport | None = None
    failures: list[str] = field(default_factory=list)  # parts of the examination that failed

    @property
    def ok(self) -> bool:
        ops_ok = all(item.status != "wrong" for item in self.ops)
        return ops_ok and not self.failures and (self.model is None or self.model.ok)

    def conclusions(self) -> list[str]:
        """What is wrong, in words, with the likeliest cause first."""
        lines = []
        for row in summarize(item for item in self.ops if item.status == "wrong"):
            lines.append(
                f"op {row['op']} ({row['ran']}), case {row['worst_case']}: {row['detail']}"
            )
        return lines + (model_conclusions(self.model) if self.model else []) + self.failures

    @property
    def is_complete(self) -> bool:
        """Every case of every op was checked."""
        return not coverage(self.ops).left_out

    def verdict(self) -> str:
        """The last line, if nothing is wrong: it says so only of what was checked."""
        seen = coverage(self.ops)
        if seen.left_out:
            return (
                f"{seen.total - seen.num_left_out} of {seen.total} cases of ops checked, nothing "
                "wrong among them; --all checks the rest"
            )
        return f"nothing is wrong: all {seen.total} cases of ops checked"

    def to_json(self) -> dict[str, Any]:
        cases = coverage(self.ops)
        return {
            "ok": self.ok,
            "complete": self.is_complete,
            "conclusions": self.conclusions(),
            "cases": {"total": cases.total, **asdict(cases)},
            "machine": self.machine.to_json(),
            "ops": [_finite(asdict(item)) for item in self.ops],
            "model": model_json(self.model) if self.model else None,
            "failures": self.failures,
            "next": NEXT,
        }

    def write(self, path: Path) -> None:
        """As JSON, with private data removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = scrub(self.to_json(), private_words())
        path.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


def model_conclusions(model: ModelReport) -> list[str]:
    lines, first = [], model.first.cell if model.first else None
    if first is not None:
        lines.append("first wrong op: " + describe(first))
    for cell in model.wrong:
        if first is not None and (cell.layer, cell.station) == (first.layer, first.station):
            continue
        if cell.status == "wrong":
            lines.append("also wrong: " + describe(cell))
        else:
            lines.append(f"{cell.title} in layer {cell.layer} was {cell.status}")
    if model.unplaced:
        names = ", ".join(model.unplaced)
        lines.append(f"called where a layer has no place for it, not compared: {names}")
    for item in model.crossings:
        if item.status == "wrong":
            lines.append(
                f"{item.name}: layer {item.layer}, {item.station}, position {item.position}: "
                f"{item.detail}"
            )
    if model.judged_end_to_end and not model.end_to_end_ok and not lines:
        error = model.end_to_end[max(model.end_to_end)]
        lines.append(
            f"every op is right on its own inputs, but the logits are {error.mean:.1%} off end to "
            "end: something between the ops is wrong"
        )
    return lines


def describe(cell: GridCell) -> str:
    text = (
        f"{cell.title} in layer {cell.layer}: {cell.tap} is off by "
        f"{cell.error.worst:.2g} at position {cell.position} (allowed {cell.limit.worst:.2g})"
    )
    return f"{text}; {cell.cause.text}" if cell.cause else text


def model_json(model: ModelReport) -> dict[str, Any]:
    return {
        "ok": model.ok,
        "name": model.name,
        "layout": model.layout,
        "settings": model.settings,
        "streamed": model.streamed,
        "num_tokens": model.num_tokens,
        "first_wrong": _cell_json(model.first.cell) if model.first else None,
        "cells": [_cell_json(cell) for cell in model.cells],
        "end_to_end": {str(k): _finite(asdict(e)) for k, e in sorted(model.end_to_end.items())},
        "end_to_end_ok": model.end_to_end_ok if model.judged_end_to_end else None,
        "unplaced": model.unplaced,
        "plan": model.plan,
        "cross_checks": [asdict(item) for item in model.crossings],
    }


def _cell_json(cell: GridCell) -> dict[str, Any]:
    return {
        "layer": cell.layer,
        "station": cell.station,
        "op": cell.op,
        "status": cell.status,
        "tap": cell.tap,
        "position": cell.position,
        "step": cell.step,
        **_finite(asdict(cell.error)),
        "allowed_worst": cell.limit.worst,
        "allowed_mean": cell.limit.mean,
        "cause": asdict(cell.cause) if cell.cause else None,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        key: "inf" if isinstance(value, float) and math.isinf(value) else value
        for key, value in values.items()
    }
