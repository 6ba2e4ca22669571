"""Progress of long work: a bar with rate and time left; without a terminal, periodic lines."""

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dsv4.util.sizes import size_text, time_text

LINE_SECONDS = 10.0  # between lines where there is no terminal
RATED_BYTES = 1 << 26  # or a hundredth of all: fewer tell nothing about the rest


class ProgressBar:
    """Call it with (done, total); the bar appears on the first call and disappears at the end.

    `unit`: "bytes", or a noun. A call with 0 done starts the clock.
    """

    def __init__(self, console: Console, title: str, unit: str = "bytes") -> None:
        self._console = console
        self._title = title
        self._unit = unit
        self._begin = self._said = time.monotonic()
        counts = (
            (DownloadColumn(), TransferSpeedColumn())
            if unit == "bytes"
            else (MofNCompleteColumn(), TextColumn(unit))
        )
        columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> "ProgressBar":
        self._begin = self._said = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._begin = self._said = now
        if self._console.is_terminal:
            if done < total and not self._bar.live.is_started:
                self._bar.start()
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self.stop()
        elif now - self._said >= LINE_SECONDS and done < total:
            self._said = now
            line = progress_line(self._title, self._unit, done, total, now - self._begin)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_line(title: str, unit: str, done: int, total: int, seconds: float) -> str:
    """ "loading weights: 34 % of 159.61 GB, 1.20 GB/s, 1:28 min left"."""
    rate = done / seconds if seconds > 0 else 0.0
    whole = size_text(total) if unit == "bytes" else f"{total:,} {unit}"
    if unit == "bytes" and done < min(total / 100, RATED_BYTES):
        return f"{title}: {100 * done / total:.0f} % of {whole}"
    speed = f"{size_text(rate)}/s" if unit == "bytes" else f"{rate:.3g} {unit}/s"
    left = f", {time_text((total - done) / rate)} left" if rate else ""
    return f"{title}: {100 * done / total:.0f} % of {whole}, {speed}{left}"


def parts_text(done: int, total: int, seconds: float) -> str:
    """ "3 of 12 done, 20 s each, 3:00 min left"; "40 of 90 done, 2.5/s, 20 s left"."""
    text = f"{done} of {total} done"
    if not (done and seconds):
        return text
    each = seconds / done
    rate = f"{1 / each:.3g}/s" if each < 1 else f"{time_text(each)} each"
    return f"{text}, {rate}, {time_text(each * (total - done))} left"


class StageStatus:
    """Work in named parts: a spinner in a terminal, one line per part elsewhere.

    Where the number of parts is known, pass how many are done to show the rate and the time left.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._begin = time.monotonic()

    def __enter__(self) -> "StageStatus":
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if total and done == 0:
            self._begin = time.monotonic()
        if total:
            text += f" ({parts_text(done, total, time.monotonic() - self._begin)})"
        if self._console.is_terminal:
            self._status.update(text)
            self._status.start()
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def pause(self) -> None:
        """Call before anything else draws: two live displays cannot share a terminal."""
        self._status.stop()
