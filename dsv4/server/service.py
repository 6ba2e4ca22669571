"""Shared by all endpoints: the engine, the tokenizer, the model's names, metrics and traces."""

import asyncio
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dsv4 import __version__
from dsv4.chat import DIALECTS, Conversation, Dialect, Prompt, Tokenizer
from dsv4.errors import Dsv4Error, RequestError
from dsv4.server.api_error import ApiError, bad_request
from dsv4.server.metrics import Metrics
from dsv4.server.options import (
    MAX_ALL_LOGPROBS,
    MAX_LARGE_WAITING,
    MAX_LOGPROBS,
    ServerOptions,
)
from dsv4.server.schemas import Body
from dsv4.server.worker.link import RequestLink
from dsv4.util.models import model_folder

log = logging.getLogger(__name__)

FINGERPRINT = f"dsv4-{__version__}"
MAX_REASONINGS = 1024  # calls whose reasoning is kept
MAX_REASONING_CHARACTERS = 100_000
IDS_A_PIECE = 1 << 16  # checked per call, which holds the GIL
T = TypeVar("T")


class Service:
    def __init__(self, model: str, options: ServerOptions, link: RequestLink) -> None:
        folder = model_folder(model)
        has_tokenizer = (folder / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
        if not has_tokenizer:
            log.warning("%s has no tokenizer.json: only /v1/completions of token ids works", folder)
        self.options = options
        self.link = link
        self.names = options.names or (folder.resolve().name,)
        self.metrics = Metrics(self.names[0], link)
        self.trace = RequestTrace(options.trace)
        self.reasoning_cache = ReasoningCache()
        self.created = int(time.time())
        self.is_draining = False
        self._num_logprobs = 0  # reserved by running requests

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ApiError(
                400,
                "this model has no tokenizer.json, so it reads no text; send token ids to "
                "/v1/completions",
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def token_name(self, token: int) -> str:
        """A token's name in log-probabilities."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return token_text(self._tokenizer.token_bytes(token))

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.link.facts["dialect"]]

    @property
    def max_context(self) -> int:
        return int(self.link.facts["max_context"])

    def accept(self, body: Body, count: int = 1) -> str:
        """Checks for every generating request; returns the model name to answer under."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        self._refuse_unsupported(body)
        if (getattr(body, "priority", None) or 0) > 0 and not current_client.get().may_prioritise:
            text = (
                "priority: found one above 0, expected none from this key; see --priority-key-file"
            )
            raise ApiError(403, text, param="priority", code="priority_not_allowed")
        name = self.model_name(body.model)
        self.link.check_room(count)
        return name

    def model_name(self, name: str | None) -> str:
        if name is None:
            return self.names[0]
        if name not in self.names and not self.options.any_model:
            known = ", ".join(self.names)
            raise ApiError(
                404,
                f"model: found {name[:80]!r}, expected {known}",
                param="model",
                code="model_not_found",
            )
        return name

    def _refuse_unsupported(self, body: Body) -> None:
        extra = body.model_extra or {}
        for name, value in extra.items():
            if name in body.UNSUPPORTED and value not in (None, False, [], {}, 0, ""):
                raise ApiError(
                    400,
                    f"{name}: not supported here; {body.UNSUPPORTED[name]}",
                    param=name,
                    code="unsupported_parameter",
                )
        unknown = sorted(extra.keys() - body.UNSUPPORTED.keys())
        if unknown:
            log.debug("fields without effect: %s", ", ".join(unknown)[:500])

    async def metrics_text(self) -> bytes:
        return self.metrics.text()

    def salt(self, own: str | None) -> str:
        """Prefixes are shared within a key; a client may partition its own further."""
        name = current_client.get().name
        return f"{name}:{own or ''}" if name else own or ""

    @contextmanager
    def hold_logprobs(self, count: int) -> Iterator[None]:
        """Reserve memory for this many while an answer is collected and written."""
        if count > MAX_LOGPROBS:
            raise ApiError(
                400,
                f"logprobs: found up to {count} log-probabilities (choices x tokens x "
                f"alternatives), expected at most {MAX_LOGPROBS}; lower n, max_tokens or "
                "top_logprobs, or stream",
                param="logprobs",
                code="too_many_logprobs",
            )
        if self._num_logprobs + count > MAX_ALL_LOGPROBS:
            text = f"answers with up to {self._num_logprobs} log-probabilities are under way"
            raise ApiError(503, f"{text}; try again", code="busy", retry_after=5)
        self._num_logprobs += count
        try:
            yield
        finally:
            self._num_logprobs -= count

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        self.check_length(sum(len(text) for text, _ in prompt.segments))
        return prompt.ids(self.tokenizer)

    def check_length(self, num_characters: int, path: str = "messages") -> None:
        """Refuse a text that cannot fit the context, before tokenising it."""
        least = self.tokenizer.least_tokens(num_characters)
        if least > self.max_context:
            raise ApiError(
                400,
                f"{path}: found {num_characters} characters, which are {least} tokens or more, "
                f"expected at most {self.max_context} tokens; shorten the text",
                param=path,
                code="context_length_exceeded",
            )

    def check_ids(self, ids: Sequence[int], path: str, last: int | None = None) -> None:
        """`last`: the highest valid id, by default the vocabulary's last."""
        if last is None:
            last = int(self.link.facts["vocab_size"]) - 1
        for start in range(0, len(ids), IDS_A_PIECE):
            piece = ids[start : start + IDS_A_PIECE]
            low, high = min(piece), max(piece)
            if low < 0 or high > last:
                found = low if low < 0 else high
                text = f"{path}: found the token id {str(found)[:40]}, expected 0 to {last}"
                raise ApiError(400, text, param=path)

    def limit_tokens(
        self, asked: int | None, num_prompt: int, default: int, path: str = "messages"
    ) -> int:
        """How many tokens may be generated; refuses a limit that the context cannot hold."""
        room = self.max_context - num_prompt
        if room < 1 or (asked or 0) > room:
            raise ApiError(
                400,
                f"{path}: found a prompt of {num_prompt} tokens and {asked or 1} to generate, "
                f"expected at most {self.max_context} in all; shorten the prompt or lower "
                "max_tokens",
                param=path,
                code="context_length_exceeded",
            )
        return asked or min(default, room)


@dataclass(frozen=True)
class Client:
    """The sender of a request. `name`: a digest of the key, empty without keys."""

    name: str = ""
    may_prioritise: bool = False


NOBODY = Client()
current_client: ContextVar[Client] = ContextVar("current_client", default=NOBODY)
is_large: ContextVar[bool] = ContextVar("is_large", default=False)  # this request's body


class BoundedThreads:
    """A thread pool with a bounded queue."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads)
        self._most = num_threads + max_waiting
        self._jobs: set[Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        if len(self._jobs) >= self._most:
            text = f"{len(self._jobs)} requests wait to be read; try again"
            raise ApiError(503, text, code="busy", retry_after=1)
        job = self._pool.submit(copy_context().run, work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(job)


_QUICK = BoundedThreads(4, 4096)
_LARGE = BoundedThreads(2, MAX_LARGE_WAITING)  # separate: short requests need not wait


async def in_large_thread(work: Callable[[], T]) -> T:
    return await _LARGE.run(work)


async def in_thread(work: Callable[[], T]) -> T:
    """Parse and tokenise off the event loop. RequestErrors become error responses."""
    try:
        return await (_LARGE if is_large.get() else _QUICK).run(work)
    except RequestError as error:
        raise bad_request(error) from error
    except Dsv4Error as error:
        raise ApiError(400, str(error)) from error


class ReasoningCache:
    """The reasoning before tool calls, by call id.

    Many clients send calls back without it, although the model expects to see it again.
    """

    def __init__(self) -> None:
        self._reasoning: OrderedDict[tuple[str, str], str] = OrderedDict()

    def keep(self, call_ids: list[str], reasoning: str) -> None:
        if len(reasoning) <= MAX_REASONING_CHARACTERS:
            name = current_client.get().name
            self._reasoning.update({(name, call_id): reasoning for call_id in call_ids})
        while len(self._reasoning) > MAX_REASONINGS:
            self._reasoning.popitem(last=False)

    def restore(self, conversation: Conversation) -> Conversation:
        name = current_client.get().name
        messages = tuple(
            replace(message, reasoning=self._reasoning.get((name, message.calls[0].id or ""), ""))
            if message.calls and not message.reasoning
            else message
            for message in conversation.messages
        )
        return replace(conversation, messages=messages)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class RequestTrace:
    """Writes exact prompts and raw outputs to a file, if the operator enabled it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_broken = False

    def write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._is_broken = False
        except OSError as error:  # a full disk must not stop serving
            if not self._is_broken:
                log.error("the trace cannot be written (%s); serving goes on without it", error)
            self._is_broken = True


def token_text(data: bytes) -> str:
    """A token's text, or its bytes in hexadecimal if they are not complete characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)
