"""The web process's end: starts and restarts the engine process, and distributes its outputs."""

import asyncio
import itertools
import json
import logging
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from dsv4.config import EngineConfig
from dsv4.errors import RequestError
from dsv4.request import Request, TokenLogprobs
from dsv4.server.api_error import ApiError, bad_request, internal_error
from dsv4.server.worker.mailbox import Mailbox, Scores
from dsv4.server.worker.wire import (
    LENGTH_BYTES,
    WireMessage,
    ids_to_wire,
    message_size,
    output_from_wire,
    pack,
    pack_prompt,
    request_to_wire,
)

log = logging.getLogger(__name__)

MESSAGES_A_TURN = 8  # read before streams may write; late ones then write several tokens at once
MAX_TOKENS = 1 << 24  # of running and waiting prompts; beyond this requests are refused
BEAT_LATE_SECONDS = 3.0  # without a heartbeat the engine is not ready; one comes every 0.5 s
SILENT_SECONDS = 300.0  # without a heartbeat from a loading engine
RANKS_STEP = 1.5  # of step_timeout: several ranks have a watch of their own, which names who hangs
END_SECONDS = 0.5  # for an engine process to end on its own
RANKS_END_SECONDS = 6.0  # if it said that it ends; it takes at most 5 itself
FLUSH_SECONDS = 60.0  # for an engine with a prefix store to write it at shutdown
MAX_STARTS = 3  # that may fail before the first success
BACKOFF_SECONDS = (0.2, 1.0, 5.0, 30.0)  # before restarts, while none answers anything

ENGINE = ("-m", "dsv4.server.worker.main")

Notify = Callable[[WireMessage], None]  # gets plan, progress, ready and failed


class RequestLink(ABC):
    """Requests in flight to an engine, wherever it runs, and the messages that answer them.

    `state`: starting, ready, restarting, failed or stopped.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._live: dict[str, Mailbox] = {}
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._scores: dict[str, Scores] = {}
        self.state = "starting"
        self.error = ""  # why it had to restart, until it is ready
        self.facts: WireMessage = {}
        self.stats: WireMessage = {}
        self.num_restarts = 0
        self.prefix_keys = ""  # of the engine's cached prefixes, in hexadecimal
        # called with a request's queue and prefill seconds before its first token
        self.on_first_token: Callable[[float, float], None] = lambda waited, computed: None
        self.on_error: Callable[[str], None] = lambda code: None  # called with an error's name

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """An engine is loaded and its loop is running."""

    @abstractmethod
    def _submit(self, name: str, data: bytes, request: Request | None) -> None:
        """Send a packed `add` (of this request) or `score` to an engine."""

    @abstractmethod
    def _tell_abort(self, name: str) -> None: ...

    @property
    def num_live(self) -> int:
        return len(self._live) + len(self._scores)

    def check_ready(self) -> None:
        if self.state != "ready":
            raise ApiError(
                503, f"the model is {self.state}; try again", code=self.state, retry_after=2
            )

    def check_loaded(self) -> None:
        """Requests that need only the model's facts are served even while the engine restarts."""
        if not self.facts:
            self.check_ready()

    def check_room(self, count: int) -> None:
        """Refuse a request if too many requests or prompt tokens are waiting."""
        self.check_ready()
        num_tokens = sum({box: box.num_tokens for box in self._live.values()}.values())
        most = self.facts["max_sequences"] + self._max_waiting
        if self.num_live + count > most or num_tokens > MAX_TOKENS:
            found = f"{self.num_live} requests with {num_tokens} prompt tokens run or wait"
            text = f"{found}, expected at most {most} and {MAX_TOKENS}; try again later"
            raise ApiError(429, text, code="queue_full", retry_after=1)

    def open(self) -> Mailbox:
        return Mailbox(self)

    async def send(self, request: Request, box: Mailbox) -> None:
        """Submit a request and wait until an engine has taken or refused it."""
        name = request.id
        data = await pack_prompt(
            request.prompt_ids,
            lambda: {"kind": "add", "id": name, "request": request_to_wire(request)},
        )
        self.check_ready()
        answer = asyncio.get_running_loop().create_future()
        self._live[name], self._answers[name] = box, answer
        self._submit(name, data, request)
        try:
            await answer
        except BaseException:
            self.forget(name)
            raise

    async def score(self, name: str, ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of all tokens of a prompt except the first."""
        data = await pack_prompt(
            ids, lambda: {"kind": "score", "id": name, "ids": ids_to_wire(ids), "top": top}
        )
        self.check_ready()
        scores = self._scores[name] = Scores()
        self._submit(name, data, None)
        try:
            message = await scores.answer
        finally:
            del self._scores[name]
            self._tell_abort(name)
        if message["kind"] == "refused":
            raise bad_request(RequestError(message["error"]))
        if message["kind"] == "broken":
            log.error("%s: a prompt could not be scored: %s", name, message["error"])
            self._note_error(message.get("code"))
            raise internal_error(name, message.get("code"), message["error"])
        return scores.found

    def forget(self, name: str) -> None:
        """Abort a request whose client is gone."""
        self._answers.pop(name, None)
        if self._live.pop(name, None) is not None:
            self._tell_abort(name)

    def fail(self, name: str, error: ApiError) -> None:
        """End one request with an error, even if no engine has accepted it yet."""
        waiting: list[asyncio.Future[Any]] = []
        if name in self._answers:
            waiting.append(self._answers[name])
        if name in self._scores:
            waiting.append(self._scores[name].answer)
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)
        box = self._live.get(name)
        if box is not None:
            box.fail(error)
            self.forget(name)

    def fail_all(self, error: ApiError) -> None:
        for name in {**self._answers, **self._scores, **self._live}:
            self.fail(name, error)

    def _deliver_answer(self, message: WireMessage) -> None:
        name = message["id"]
        if name in self._scores:
            if message["kind"] != "accepted":
                self._scores[name].deliver(message)
        elif name in self._answers:
            answer = self._answers.pop(name)
            if answer.done():
                return
            if message["kind"] == "accepted":
                answer.set_result(None)
            elif message.get("busy"):
                error = ApiError(503, message["error"], code="engine_busy", retry_after=5)
                answer.set_exception(error)
            else:
                answer.set_exception(bad_request(RequestError(message["error"])))

    def _note_error(self, code: str | None) -> None:
        if code is not None:
            self.on_error(code)

    def _deliver_outputs(self, messages: list[WireMessage]) -> None:
        for message in messages:
            if "times" in message and message["id"].endswith("-0"):  # its first phase
                self.on_first_token(*message["times"])
            output = output_from_wire(message)
            self._note_error(output.error_code)
            box = self._live.get(output.request_id)
            if box is None:
                continue  # aborted in the meantime
            if output.finished:
                del self._live[output.request_id]
            if not box.deliver(output):
                self.forget(output.request_id)


class EngineLink(RequestLink):
    """One engine process at a time, on this machine."""

    def __init__(
        self,
        model: str,
        choices: dict[str, Any],
        notify: Notify,
        *,
        max_waiting: int,
        engine: tuple[str, ...] = ENGINE,
    ) -> None:
        super().__init__(max_waiting)
        level = logging.getLogger().getEffectiveLevel()
        self._start_message: dict[str, Any] = {
            "kind": "load",
            "model": model,
            "choices": choices,
            "log_level": level,
        }
        self._notify = notify
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._heard_at = self._turned_at = time.monotonic()
        self._has_answered = False  # this process has answered a request
        self._ending = ""  # why this process said that it ends
        self._step_timeout: float = choices.get("step_timeout", EngineConfig.step_timeout)

    @property
    def is_healthy(self) -> bool:
        return self.state == "ready" and self.is_responsive

    @property
    def is_responsive(self) -> bool:
        now = time.monotonic()
        is_turning = now - self._turned_at < max(self._step_timeout / 4, BEAT_LATE_SECONDS)
        return is_turning and now - self._heard_at < BEAT_LATE_SECONDS

    def _submit(self, name: str, data: bytes, request: Request | None) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def _tell_abort(self, name: str) -> None:
        if self.state == "ready" and self._writer is not None:
            self._writer.write(pack({"kind": "abort", "id": name}))

    # --- the process --------------------------------------------------------------------------

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        flushes = self._start_message["choices"].get("prefix_disk") and self.is_responsive
        seconds = FLUSH_SECONDS if flushes else END_SECONDS
        if self.state in ("starting", "restarting"):
            seconds = 0.0  # a loading engine has nothing to finish, and does not listen
        self.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._end_process(seconds)

    async def _supervise(self) -> None:
        failures = 0
        while self.state != "failed":
            failures = await self._run_and_recover(failures)

    async def _run_and_recover(self, failures: int) -> int:
        """Run one engine process until it ends; returns how many in a row were useless."""
        begin = time.monotonic()
        self._has_answered = False
        try:
            await self._run_once()
        except Exception:  # an invalid message: restart as if the process had died
            log.exception("the engine process cannot be understood")
        if self.state == "failed":
            return failures
        is_of_use = self._has_answered or time.monotonic() - begin > 60
        failures = 0 if is_of_use else failures + 1
        if not self.facts and failures == MAX_STARTS:
            error = f"the engine process ended {failures} times before it was ready"
            self._on_message({"kind": "failed", "error": error, "exit_code": 1})
            return failures
        # Requests need not wait until the process has ended.
        self.state = "restarting" if self.facts else "starting"
        self.num_restarts += bool(self.facts)
        self.stats = {}
        self.error = self._ending or "the engine process ended"
        why = self._ending or "the engine stopped in the middle of this request"
        error = f"{why}; it is being restarted"
        self.fail_all(ApiError(503, error, code="engine_died", retry_after=2))
        await self._end_process(RANKS_END_SECONDS if self._ending else END_SECONDS)
        pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
        log.error("the engine process ended; restarting it in %.1f s", pause)
        await asyncio.sleep(pause)
        return failures

    async def _run_once(self) -> None:
        """Start a process and read from it until it ends, or says that it does."""
        self._ending = ""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *self._engine, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the web process; it drains first
            )
        self._heard_at = self._turned_at = time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(pack(self._start_message))
        watch = asyncio.create_task(self._watch(self._process))
        try:
            for count in itertools.count(1):
                size = message_size(await reader.readexactly(LENGTH_BYTES))
                message = json.loads(await reader.readexactly(size))
                if message["kind"] == "ending":
                    self._ending = message["error"]
                    return
                self._on_message(message)
                if count % MESSAGES_A_TURN == 0:
                    await asyncio.sleep(0)  # reading buffered data does not yield
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            watch.cancel()

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill an engine that makes no progress: a stuck kernel, a stopped process."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            limit = self._step_timeout * (RANKS_STEP if self.stats.get("ranks") else 1)
            is_stuck = self.state == "ready" and now - self._turned_at > limit
            if is_stuck or now - self._heard_at > max(self._step_timeout, SILENT_SECONDS):
                age = now - (self._turned_at if is_stuck else self._heard_at)
                self._ending = f"the engine made no progress for {age:.0f} s"
                log.error("%s; it is ended", self._ending)
                process.kill()  # the reader sees EOF
                return

    async def _end_process(self, seconds: float) -> None:
        """Wait until the process ends; kill it after `seconds`."""
        if self._process is not None and not seconds:
            self._process.kill()
        if self._writer is not None:
            self._writer.close()  # the engine notices between steps
            self._writer = None
        until = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > until:
                self._process.kill()
            await asyncio.sleep(0.02)
        self._process = None

    def _on_message(self, message: WireMessage) -> None:
        self._heard_at = now = time.monotonic()
        self._turned_at = now - message.get("age", 0.0)
        kind = message["kind"]
        if kind == "beat":
            return
        if kind == "outputs":
            self._has_answered |= any(
                output.get("finish") in ("stop", "length") for output in message["outputs"]
            )
            self._deliver_outputs(message["outputs"])
        elif kind == "stats":
            self.stats = message["stats"]
        elif kind == "prefixes":
            self.prefix_keys = message["keys"]
        elif kind in ("accepted", "refused", "scores", "broken"):
            self._deliver_answer(message)
        else:
            if kind == "ready":
                self.facts, self.state, self.error = message["facts"], "ready", ""
            elif kind == "failed":
                # Before the first success this is a user error; later, files may reappear.
                self.state = "restarting" if self.facts else "failed"
            self._notify(message)
