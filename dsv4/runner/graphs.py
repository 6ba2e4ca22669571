"""Parts of steps as CUDA graphs: captured once per shape, then replayed."""

import gc
import logging
from collections.abc import Callable, Hashable, Iterable

import torch

from dsv4.errors import KernelError

log = logging.getLogger(__name__)


class Graphs:
    """All graphs share one memory pool: they never run concurrently, and a step's results are
    in buffers outside it."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(
        self, steps: Iterable[tuple[Hashable, Callable[[], None]]], done: Callable[[], None]
    ) -> None:
        """Every kernel must already be loaded; `done` is called after each step. A step that cannot
        be captured, and all that remain when memory runs out, run one launch at a time."""
        torch.cuda.synchronize()
        gc.collect()
        gc.disable()  # a collection during a capture could free memory that it uses
        lost: list[str] = []
        try:
            for key, step in steps:
                try:
                    self._graphs[key] = self._capture(step)
                except torch.cuda.OutOfMemoryError:
                    lost.append("the GPU's memory ran out; lower max_sequences or max_context")
                    break
                except RuntimeError as error:
                    lost.append(f"{key}: {error}")
                done()
        finally:
            gc.enable()
        if lost:
            log.warning(
                "%d graphs were captured; other steps run one launch at a time: %s",
                len(self._graphs),
                lost[0],
            )

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def run(self, key: Hashable) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            raise KernelError(f"no graph was captured for {key}")
        graph.replay()
