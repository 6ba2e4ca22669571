"""Everything that could surprise a request later, done once before the engine is ready.

Every shape a step can have is run three times: with launches that only compile, side by side on
all cores; for real, so that workspaces reach their size; and, for decode steps, into a graph.
Compiled kernels are kept on disk by Triton (`TRITON_CACHE_DIR`), so a second start only loads.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module

import torch

from dsv4.cache.geometry import PAGE_ENTRIES, Geometry, Pool
from dsv4.ops.op import kernels_only
from dsv4.ops.workspace import freeze_workspaces, workspace_bytes
from dsv4.runner.buffers import Bucket, DecodeBuffers

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # pieces done, pieces in all
ALL_LOGITS = 256  # most rows of a prompt whose logits are all wanted, as `score` asks


def prompt_lengths(chunk_tokens: int) -> list[int]:
    """Most kernels choose their form at powers of two: one length beyond each, and the longest."""
    lengths, size = [], 2
    while size < chunk_tokens:
        lengths.append(size)
        size = 2 * size - 1 if size > 2 else 5
    return [*lengths, chunk_tokens]


class Forms:
    """What experts and attention choose at other numbers of tokens, and by the context."""

    MOST = 1024  # tokens; beyond, attention chooses by the context alone

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        self.geometry = geometry
        self.narrow = dtype == torch.bfloat16 and geometry.kv_format != "fp32"
        self._experts = import_module("dsv4.ops.moe.experts_triton")
        self._route = import_module("dsv4.ops.moe.route_triton")
        self._attention = import_module("dsv4.ops.attention.attention_triton")

    def __call__(self, tokens: int, context: int) -> set[Hashable]:
        """Tokens beyond a chunk are of other sequences."""
        c, found = self.geometry.config, set[Hashable]()
        tiles = self._experts.choose_config(tokens, c.num_experts_per_tok, c.num_experts)
        found.add((tiles, self._route.choose_config(tokens * c.num_experts_per_tok)))
        sequences = 1 + max(0, tokens - self.geometry.chunk_tokens)
        for ratio in sorted(set(c.compress_ratios)):
            pool: Pool = "csa" if ratio == 4 else "hca"
            held = 0
            if ratio:
                pages = max(1, len(self.geometry.pages_needed(pool, 0, context)))
                held = pages * PAGE_ENTRIES[pool]
            seen = min(held, c.index_topk) if ratio == 4 else held
            sizes = self._attention.Sizes(
                tokens,
                sequences,
                c.num_heads,
                c.head_dim,
                c.rope_head_dim,
                c.sliding_window,
                seen,
                held,
            )
            for unpacked in (True, False):  # the second is compiled with the first
                form = self._attention.form_of(sizes, self.narrow, unpacked=unpacked)
                found.add((ratio, form))
        return found


def prompt_shapes(
    chunk_tokens: int, most_tokens: int, contexts: Sequence[int], forms: Forms
) -> list[tuple[int, int]]:
    """Tokens and context of prompts that between them need every kernel, the largest first."""
    lengths = prompt_lengths(chunk_tokens)
    shapes = [(most_tokens, contexts[-1])]
    shapes += [(n, contexts[-1]) for n in reversed(lengths)]
    shapes += [(lengths[0], context) for context in contexts[:-1]]
    seen = set[Hashable]().union(*(forms(*shape) for shape in shapes))
    for context in reversed(contexts):
        most = most_tokens if context == contexts[-1] else min(most_tokens, Forms.MOST)
        for tokens in (*range(1, most + 1), chunk_tokens):
            new = forms(tokens, context) - seen
            if new:
                shapes.append((tokens, context))
                seen |= new
    return shapes


class Pieces:
    """Counts pieces of work and says now and then how long the rest will take."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress = progress
        self._begin = self._said = time.perf_counter()

    def __call__(self) -> None:
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.total)
        now = time.perf_counter()
        if now - self._said > 5.0:
            self._said = now
            left = (now - self._begin) * (self.total - self.done) / self.done
            log.info("warm-up: %d of %d, about %.0f s left", self.done, self.total, left)


def warm_up(
    buffers: DecodeBuffers,
    chunk_tokens: int,
    decode: Callable[[Bucket], None],
    prompt: Callable[[int, int, int], None],
    capture: Callable[[list[Bucket], Callable[[], None]], None],
    forms: Forms,
    progress: Progress | None = None,
) -> None:
    """`decode` runs a bucket's step, `prompt` a prompt of so many tokens, context and logits."""
    device = buffers.device
    buckets = buffers.buckets()
    # the most tokens a step can have: a whole chunk, and everyone else decodes
    most_tokens = chunk_tokens + buffers.batches[-1] - 1
    shapes = prompt_shapes(chunk_tokens, most_tokens, buffers.contexts, forms)
    prompts = [(tokens, context, 1) for tokens, context in shapes]
    most = min(chunk_tokens, ALL_LOGITS)
    prompts.append((most, buffers.contexts[0], most))
    pieces = Pieces(2 * len(prompts) + 3 * len(buckets), progress)
    freeze_workspaces(device, False)

    def run_all() -> None:
        for length, context, num_logits in prompts:
            prompt(length, context, num_logits)
            pieces()
        for bucket in buckets:
            rewind(buffers)
            decode(bucket)
            pieces()

    begin = time.perf_counter()
    with _compiling(), kernels_only():  # a graph holds kernels, not references
        run_all()
    compiled = time.perf_counter()
    run_all()
    freeze_workspaces(device)
    rewind(buffers)
    capture(buckets, pieces)
    rewind(buffers)
    log.info(
        "warm-up: compiled in %.1f s, %d graphs in %.1f s, workspaces %.2f GB",
        compiled - begin,
        len(buckets),
        time.perf_counter() - compiled,
        workspace_bytes(device) / 1e9,
    )


def rewind(buffers: DecodeBuffers) -> None:
    """All places at the beginning of the first page, where garbage does no harm yet."""
    for tensor in (buffers.token_ids, buffers.positions, buffers.slots):
        tensor.zero_()
    buffers.ends.fill_(1)
    for tables in buffers.tables.values():
        for table in tables.values():
            table.zero_()


def _compiling() -> AbstractContextManager[None]:
    module = import_module("dsv4.ops.compile_triton")
    context: AbstractContextManager[None] = module.compile_only(os.cpu_count() or 1)
    return context
