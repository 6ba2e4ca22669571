"""asyncio streams over a step-driven engine: one task runs the steps for all of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Generic, Protocol, TypeVar


class Answer(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def finished(self) -> bool: ...


T = TypeVar("T", bound=Answer)


class AsyncStreams(Generic[T]):
    """`step(ids)` returns the new outputs of these ids; it runs on a thread, under the lock.

    Anything else that touches the engine while streams run must hold the lock too.
    """

    def __init__(
        self, step: Callable[[Collection[str]], list[T]], abort: Callable[[str], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        self._step = step
        self._abort = abort
        self._queues: dict[str, asyncio.Queue[T | Exception]] = {}
        self._driver: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether these streams belong to the running event loop."""
        return self._loop is asyncio.get_running_loop()

    async def stream(self, request_id: str, add: Callable[[], None]) -> AsyncGenerator[T, None]:
        """Outputs of one request; leaving the stream early aborts it."""
        async with self.lock:
            add()
            queue = self._queues[request_id] = asyncio.Queue()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item.finished:
                    del self._queues[request_id]
                yield item
                if item.finished:
                    return
        finally:
            if self._queues.pop(request_id, None) is not None:
                async with self.lock:
                    self._abort(request_id)

    async def _drive(self) -> None:
        while self._queues:
            async with self.lock:
                try:
                    items = await asyncio.to_thread(self._step, list(self._queues))
                except Exception as error:  # passed on to every listener
                    for queue in self._queues.values():
                        queue.put_nowait(error)
                    return
            for item in items:
                if item.request_id in self._queues:
                    self._queues[item.request_id].put_nowait(item)
            await asyncio.sleep(0)
