"""Decode steps as CUDA graphs: captured once per bucket, replayed ever after."""

import gc
from collections.abc import Callable, Iterable

import torch

from dsv4.errors import CapacityError, KernelError
from dsv4.runner.buffers import Bucket


class Graphs:
    """All graphs share one pool of memory: they never run side by side, and what a step leaves
    lies in buffers outside it."""

    def __init__(self, step: Callable[[Bucket], None]) -> None:
        self._step = step
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def capture(self, buckets: Iterable[Bucket], done: Callable[[], None]) -> None:
        """Every kernel of the buckets must have run before; `done` is called after each."""
        torch.cuda.synchronize()
        gc.collect()
        gc.disable()  # a collection in the middle could free memory that a capture still counts
        try:
            for bucket in buckets:
                self._graphs[bucket] = self._capture(bucket)
                done()
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU's memory ran out after {len(self._graphs)} graphs; lower "
                "max_sequences or max_context, or set cuda_graphs=False"
            ) from error
        finally:
            gc.enable()

    def _capture(self, bucket: Bucket) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(bucket)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def run(self, bucket: Bucket) -> None:
        graph = self._graphs.get(bucket)
        if graph is None:
            raise KernelError(f"no graph was captured for {bucket}")
        graph.replay()
