"""The engine process: load, then add, step and abort as the web process asks.

    python -m dsv4.server.worker.main FD

FD is one end of a socket pair. The process ends when the other end closes.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.cache.geometry import POOLS
from dsv4.config import EngineConfig
from dsv4.engine import Engine
from dsv4.errors import CapacityError, Dsv4Error, NumericsError, RankError, RequestError
from dsv4.request import Output, SamplingParams
from dsv4.runner.load import prepare
from dsv4.server.worker.wire import (
    Channel,
    LinkClosed,
    WireMessage,
    ids_from_wire,
    output_to_wire,
    request_from_wire,
)
from dsv4.util.events import Event
from dsv4.util.logs import escape_arguments
from dsv4.util.progress import Progress

STATS_SECONDS = 0.5
STEP_BOUNDS = tuple(2**power for power in range(15))  # of tokens in a step
MAX_PIECE = 4096  # log-probabilities in one message
BEAT_SECONDS = 0.5  # between heartbeats, also during a long step
END_SECONDS = 5.0  # for the engine's thread to end by itself once a rank has failed


def main(arguments: list[str]) -> int:
    # The web process decides when to end; a signal to the whole group must not cut answers short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[1])) as connection:
        return _run(Channel(connection))


def _run(channel: Channel) -> int:
    start = channel.receive()
    if start is None:
        return 1
    logging.basicConfig(level=start["log_level"], format="engine: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(escape_arguments)
    heartbeat = Heartbeat(channel)
    try:
        engine = _load(start, channel, lambda error: _end_with_ranks(error, channel, heartbeat))
    except LinkClosed:  # stopped before it was ready
        return 1
    except Dsv4Error as error:
        _say_failed(channel, error)
        return error.exit_code
    heartbeat.turned_at = time.monotonic()
    with contextlib.suppress(ConnectionError):  # the web process ended during a step
        Worker(engine, channel, heartbeat).run()
    engine.close()
    return 0 if engine.failure is None else engine.failure.exit_code


def _end_with_ranks(error: RankError, channel: Channel, heartbeat: "Heartbeat") -> None:
    """On a thread, once a rank has failed: report it and end this process. The engine's own thread
    may never stop waiting for that rank; the web process starts all of them again."""
    say = _say_failed if heartbeat.turned_at is None else _say_ending
    threading.Thread(target=say, args=(channel, error), daemon=True).start()  # it may block
    time.sleep(END_SECONDS)
    os._exit(error.exit_code)


def _say_failed(channel: Channel, error: Dsv4Error) -> None:
    with contextlib.suppress(OSError):
        channel.send({"kind": "failed", "error": str(error), "exit_code": error.exit_code})


def _say_ending(channel: Channel, error: Dsv4Error) -> None:
    with contextlib.suppress(OSError):
        channel.send({"kind": "ending", "error": str(error)})


def _load(start: WireMessage, channel: Channel, rank_failed: Callable[[RankError], None]) -> Engine:
    prepared = prepare(start["model"], EngineConfig.make(**start["choices"]))
    channel.send({"kind": "plan", "text": str(prepared)})
    load, warm = _progress_sender(channel, "load"), _progress_sender(channel, "warm-up")
    engine = Engine.load(prepared, progress=load, warm_up_progress=warm, rank_failed=rank_failed)
    warm_up = SamplingParams(max_tokens=2, temperature=0)
    engine.generate([[engine.config.bos_id]], warm_up)  # runs every op once; nothing is built later
    channel.send(_stats(engine))  # so that statistics exist when it is ready
    channel.send({"kind": "ready", "facts": _facts(engine)})
    return engine


def _progress_sender(channel: Channel, stage: str) -> Progress:
    """Sends progress at most ten times a second, and at the end."""
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.1 or done == total:
            last = time.monotonic()
            channel.send({"kind": "progress", "stage": stage, "done": done, "total": total})

    return progress


def _facts(engine: Engine) -> WireMessage:
    config, settings = engine.config, engine.settings
    geometry = settings.geometry(config)
    return {
        "max_context": settings.max_context,
        "max_sequences": settings.max_sequences,
        "vocab_size": config.vocab_size,
        "bos_id": config.bos_id,
        "stop_ids": sorted(engine.stop_ids),
        "dialect": engine.dialect.name,
        "settings": dataclasses.asdict(settings),
        "page_bytes": {pool: geometry.page_bytes(pool) for pool in POOLS},
    }


def _stats(engine: Engine) -> WireMessage:
    return {"kind": "stats", "stats": dataclasses.asdict(engine.stats())}


class Heartbeat:
    """A thread that sends heartbeats with the time since the loop's last iteration."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.turned_at: float | None = None  # None: loading
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            turned_at = self.turned_at
            age = 0.0 if turned_at is None else time.monotonic() - turned_at
            try:
                self._channel.send({"kind": "beat", "age": age})
            except MemoryError:
                pass  # the next heartbeat may succeed
            except OSError:
                return  # the web process is gone; the loop notices on its own
            time.sleep(BEAT_SECONDS)


class _Watch:
    """An engine listener: when requests began, and the token counts of steps."""

    def __init__(self) -> None:
        self._added: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._finished: list[str] = []
        self.step_counts = [0] * (len(STEP_BOUNDS) + 1)
        self.num_tokens = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            count = event.values["num_tokens"]
            self.step_counts[bisect_left(STEP_BOUNDS, count)] += 1
            self.num_tokens += count
        elif event.request_id is not None:
            name = event.request_id
            if event.kind == "added":
                self._added[name] = event.time_s
            elif event.kind == "began":
                self._began.setdefault(name, event.time_s)
            elif event.kind == "finished":
                self._finished.append(name)

    def times(self, name: str) -> tuple[float, float] | None:
        """Queue and prefill seconds of a request before its first token; returned once."""
        added, began = self._added.pop(name, None), self._began.pop(name, None)
        if added is None or began is None:
            return None
        return began - added, time.perf_counter() - began

    def forget_finished(self) -> None:
        for name in self._finished:
            self._added.pop(name, None)
            self._began.pop(name, None)
        self._finished = []


@dataclass
class _Scoring:
    """A prompt being scored, and its progress."""

    message: WireMessage
    chunks: Iterator[list[Any]] | None = None
    num_sent: int = 0


class Worker:
    """The loop around `Engine.step`. A thread reads messages, so no step waits for input."""

    def __init__(self, engine: Engine, channel: Channel, heartbeat: "Heartbeat") -> None:
        self._engine = engine
        self._channel = channel
        self._heartbeat = heartbeat
        self._inbox: queue.SimpleQueue[WireMessage | None] = queue.SimpleQueue()
        self._scores: deque[_Scoring] = deque()
        self._stats_at = 0.0
        self._prefixes = ""  # keys last reported
        self._watch = _Watch()
        engine.listeners.append(self._watch)

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while self._handle_messages():
            self._heartbeat.turned_at = time.monotonic()
            outputs = self._engine.step()
            failure = self._engine.failure
            if failure is not None:  # the web process ends all requests with this
                _say_ending(self._channel, failure)
                return
            if outputs:
                found = [self._to_wire(output) for output in outputs]
                self._channel.send({"kind": "outputs", "outputs": found})
            self._watch.forget_finished()
            self._heartbeat.turned_at = time.monotonic()
            self._score_on()
            self._send_stats()

    def _to_wire(self, output: Output) -> WireMessage:
        message = output_to_wire(output)
        times = self._watch.times(output.request_id) if output.num_cached is not None else None
        return message if times is None else {**message, "times": times}

    def _read(self) -> None:
        try:
            with contextlib.suppress(ConnectionError):  # it closed without reading everything
                while (message := self._channel.receive()) is not None:
                    self._inbox.put(message)
            self._inbox.put(None)
        except BaseException:  # out of memory, for example: better to restart than not to listen
            os._exit(1)

    def _handle_messages(self) -> bool:
        """Handle all pending messages; wait for one only when idle."""
        busy = bool(self._engine.num_unfinished or self._scores)
        try:
            while True:
                message = self._inbox.get(block=not busy, timeout=STATS_SECONDS)
                if message is None:
                    return False
                self._on_message(message)
                busy = True
        except queue.Empty:
            return True

    def _on_message(self, message: WireMessage) -> None:
        if message["kind"] == "abort":
            self._abort(message["id"])
            return
        try:
            if message["kind"] == "add":
                self._engine.add(request_from_wire(message["request"]))
            else:
                self._scores.append(_Scoring(message))
        except (RequestError, CapacityError) as error:
            is_busy = isinstance(error, CapacityError)
            answer = {"kind": "refused", "id": message["id"], "error": str(error), "busy": is_busy}
            self._channel.send(answer)
            return
        self._channel.send({"kind": "accepted", "id": message["id"]})

    def _abort(self, name: str) -> None:
        self._scores = deque(job for job in self._scores if job.message["id"] != name)
        try:
            self._engine.abort(name)
        except RequestError:
            logging.debug("%s had ended before it was aborted", name)

    def _score(self, message: WireMessage) -> Iterator[list[Any]]:
        """Log-probabilities of a prompt's own tokens, chunk by chunk, in the form of outputs."""
        ids, top = ids_from_wire(message["ids"]), message["top"]
        place = 1
        for logits in self._engine.score(ids):
            rows = torch.log_softmax(logits.float(), -1)[: len(ids) - place]
            best, tokens = torch.topk(rows, min(top, rows.shape[1]))
            following = torch.tensor(ids[place : place + len(rows)], device=rows.device)
            chosen = rows.gather(1, following.unsqueeze(1)).squeeze(1)
            if not bool(chosen.isfinite().all()):
                raise NumericsError
            found = zip(
                following.tolist(), chosen.tolist(), tokens.tolist(), best.tolist(), strict=True
            )
            yield [
                (token, logprob, list(zip(others, values, strict=True)))
                for token, logprob, others, values in found
            ]
            place += len(rows)

    def _score_on(self) -> None:
        """Run one chunk of the first scoring job; steps of other requests run in between."""
        if not self._scores:
            return
        job = self._scores[0]
        name = job.message["id"]
        job.chunks = job.chunks or self._score(job.message)
        try:
            chunk = next(job.chunks, None)
        except CapacityError as error:
            job.chunks, job.num_sent = None, 0
            if self._engine.num_unfinished:
                return  # restarted when other requests have freed pages
            answer: WireMessage = {"kind": "broken", "error": str(error)}
        except RequestError as error:
            answer = {"kind": "refused", "error": str(error)}
        except Exception as error:  # fails only this request, unless a rank has failed
            if self._engine.failure is not None:
                return
            answer = {"kind": "broken", "error": str(error)}
            if isinstance(error, Dsv4Error):
                answer["code"] = error.code
        else:
            if chunk is not None:
                self._send_scores(job, chunk)
                return
            answer = {"kind": "scores", "first": job.num_sent, "scores": [], "is_last": True}
        self._scores.popleft()
        self._channel.send({**answer, "id": name})

    def _send_scores(self, job: _Scoring, chunk: list[Any]) -> None:
        """Send in pieces: hundreds of megabytes at once would block the wire and its reader."""
        size = max(MAX_PIECE // (1 + job.message["top"]), 1)
        for start in range(0, len(chunk), size):
            part = chunk[start : start + size]
            message = {"kind": "scores", "id": job.message["id"], "first": job.num_sent}
            self._channel.send({**message, "scores": part, "is_last": False})
            job.num_sent += len(part)

    def _send_stats(self) -> None:
        if time.monotonic() - self._stats_at >= STATS_SECONDS:
            self._stats_at = time.monotonic()
            message = _stats(self._engine)
            watch = self._watch
            steps = {"counts": watch.step_counts, "num_tokens": watch.num_tokens}
            message["stats"]["step_sizes"] = {"bounds": STEP_BOUNDS, **steps}
            self._channel.send(message)
            keys = b"".join(sorted(self._engine.cached_prefixes())).hex()
            if keys != self._prefixes:
                self._prefixes = keys
                self._channel.send({"kind": "prefixes", "keys": keys})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
