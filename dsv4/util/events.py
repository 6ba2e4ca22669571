"""Engine events for logs, metrics and traces, and the Chrome trace writer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """`kind`: added, began, preempted, finished (with a request), or step."""

    kind: str
    time_s: float  # monotonic
    request_id: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


class ChromeTrace:
    """A listener that writes a trace for chrome://tracing and Perfetto.

    It has a row for the engine's steps with their phases, one arrow per request, and counters.
    The file is complete after `close`; without it only the last bracket is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self._file.write("[\n")
        self._is_first = True

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self._step(event)
            return
        phases = {"added": "b", "finished": "e"}
        self._write(
            ph=phases.get(event.kind, "n"),
            cat="request",
            name="request",
            id=event.request_id,
            ts=event.time_s * 1e6,
            args={"event": event.kind, **event.values},
        )

    def _step(self, event: Event) -> None:
        phases: dict[str, float] = event.values["phases_s"]
        counts = {name: value for name, value in event.values.items() if name != "phases_s"}
        begin = event.time_s
        total = sum(phases.values())
        self._write(ph="X", name="step", ts=begin * 1e6, dur=total * 1e6, tid=1, args=counts)
        for name, seconds in phases.items():
            self._write(ph="X", name=name, ts=begin * 1e6, dur=seconds * 1e6, tid=1)
            begin += seconds
        for name in ("num_running", "num_waiting", "pages_used"):
            value = counts[name]
            args = value if isinstance(value, dict) else {name: value}
            self._write(ph="C", name=name, ts=event.time_s * 1e6, args=args)

    def _write(self, **fields: Any) -> None:
        separator = "" if self._is_first else ",\n"
        self._is_first = False
        self._file.write(separator + json.dumps({"pid": 1, **fields}))

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
