"""A step: scheduled work in, tokens out. Holds the model and its state; knows no requests.

`submit` queues the model's part of a step, `draw` its sampling, `read` waits for the tokens. The
host need not wait in between: a step may be submitted before the previous tokens are known, since
they are already on the device. A sequence that ended in the meantime writes only behind its last
token, and pages that were reassigned are overwritten later by their new owners.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS
from dsv4.cache.pages import Growth, SequencePages, StatePages
from dsv4.cache.state import StateTensors
from dsv4.errors import CapacityError, KernelError
from dsv4.model.inputs import StepInputs
from dsv4.model.transformer import Transformer
from dsv4.ops.kv.begin import NEWEST
from dsv4.ops.ragged import make_ragged
from dsv4.request import TokenLogprobs
from dsv4.runner.buffers import Shape, StepBuffers, step_line
from dsv4.runner.cost import StepCosts
from dsv4.runner.drawing import Drawing, Reading
from dsv4.runner.graphs import Graphs
from dsv4.runner.guard import Guard
from dsv4.runner.plan import StepPlan
from dsv4.runner.settings import Settings
from dsv4.runner.steps import draw, forward
from dsv4.runner.warmup import Progress, warm_up
from dsv4.sampling import Draw

log = logging.getLogger(__name__)

PENDING = [NEWEST]  # a chunk whose only token is still on the device


@dataclass(slots=True)
class Chunk:
    """New tokens of one sequence, and how many of the last ones need logits."""

    pages: SequencePages
    token_ids: Sequence[int]
    num_logits: int
    keep_len: int = 0  # a boundary inside the chunk to snapshot, and its row
    keep_row: int = 0


@dataclass
class Flight:
    """A step in flight: the sequences it samples for, and the results being copied back."""

    sampled: list[SequencePages]
    positions: list[int]  # of these tokens
    reading: Reading | None = None

    @property
    def is_drawn(self) -> bool:
        return self.reading is not None

    @property
    def failures(self) -> dict[int, Exception]:
        """Of `sampled`, by their place: why a token does not count."""
        return {} if self.reading is None else self.reading.failures


class Runner:
    def __init__(
        self, model: Transformer, settings: Settings, progress: Progress | None = None
    ) -> None:
        """With `cuda_graphs` the warm-up runs here and reports to `progress`."""
        config = model.config
        self.model = model
        self.device = _numbered(settings.device)
        geometry = settings.geometry(config)
        num_pages = geometry.num_pages(
            settings.max_context, settings.max_sequences, settings.state_tokens
        )
        self.pages = StatePages(geometry, settings.max_sequences, num_pages)
        self.state = StateTensors(geometry, settings.max_sequences, num_pages, settings.device)
        self.buffers = StepBuffers(
            geometry, settings.max_sequences, settings.max_context, self.device
        )
        self.guard = Guard(self.device)
        self.plan = StepPlan()
        self.costs: StepCosts | None = None
        self._drawing = Drawing(self.buffers)
        self._written: list[SequencePages | None] = [None] * settings.max_sequences
        self._graphs: Graphs | None = None
        if settings.cuda_graphs:
            try:
                self.warm_up(progress)
            except KernelError as error:
                log.warning("steps run one launch at a time, without graphs: %s", error)

    # --- steps --------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, chunks: Sequence[Chunk], started: Callable[[], None] | None = None) -> Flight:
        """Queue the model's part of a step; at most the last token of each chunk is sampled.

        Pages are allocated first; if they do not suffice, nothing changes. `started` is called
        once the step is queued, before pages behind the window are freed.
        """
        chunks = sorted(chunks, key=lambda chunk: -chunk.num_logits)  # rows of logits come first
        if not 0 < len(chunks) <= self.buffers.max_sequences:
            raise CapacityError(
                f"{len(chunks)} sequences in one step, expected 1 to "
                f"{self.buffers.max_sequences}; raise max_sequences or send fewer"
            )
        counts = [len(chunk.token_ids) for chunk in chunks]
        longest = max(c.pages.length + n for c, n in zip(chunks, counts, strict=True))
        if longest > self.buffers.contexts[-1]:
            raise CapacityError(
                f"a sequence has {longest} tokens, the context ends at {self.buffers.contexts[-1]}"
            )
        growth = self.pages.prepare([chunk.pages for chunk in chunks], counts)
        try:
            one_each = max(counts) == 1
            shape = self.buffers.shape(sum(counts), len(chunks), longest, one_each=one_each)
            self._send(shape, chunks, counts, self._new_pages(chunks, growth))
            self._run(shape)
            if started is not None:
                started()
        except BaseException:
            self.pages.cancel(growth)
            raise
        for chunk in chunks:
            self._written[chunk.pages.slot] = chunk.pages
        self.pages.apply(growth)
        sampled = [chunk.pages for chunk in chunks if chunk.num_logits]
        return Flight(sampled, [pages.length for pages in sampled])

    @torch.inference_mode()
    def draw(self, flight: Flight, draws: Sequence[Draw]) -> None:
        """Queue the sampling of a step: one token per sequence in `flight.sampled`."""
        if draws:
            rows = self._drawing.prepare(draws, flight.sampled, flight.positions)
            self._run(rows)
        flight.reading = self._drawing.read_back(draws)

    def read(self, flight: Flight) -> list[TokenLogprobs]:
        """Wait for a step and return its tokens, one per sequence in `flight.sampled`."""
        assert flight.reading is not None
        return flight.reading.results()

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 logits of the requested tokens, `[rows, vocabulary]`, in the order of `chunks`.

        Like `submit`, but without graphs and for any number of logits per chunk.
        """
        counts = [len(chunk.token_ids) for chunk in chunks]
        growth = self.pages.prepare([chunk.pages for chunk in chunks], counts)
        try:
            with self.guard.watch(strict=False):
                logits = self.model(self._inputs(chunks), self.state.layers)
        except BaseException:
            self.pages.cancel(growth)
            raise
        self.pages.apply(growth)
        for chunk in chunks:  # the slots' tables were not written
            self._written[chunk.pages.slot] = None
        return logits

    def _run(self, key: Shape | int) -> None:
        """Run a part of a step: the model for a shape, or a draw of this many rows."""
        if self._graphs is not None and key in self._graphs:
            self._graphs.run(key)  # a replay cannot compile, allocate or wait
            return
        with self.guard.watch(strict=False):
            self._run_once(key)

    def _run_once(self, key: Shape | int) -> None:
        if isinstance(key, Shape):
            forward(self.model, self.state.layers, self.buffers, key)
        else:
            draw(self.buffers, key)

    # --- host inputs of a step ----------------------------------------------------------------

    def _new_pages(self, chunks: Sequence[Chunk], growth: Growth) -> list[tuple[int, int]]:
        """(table offset, page) of every page that the device does not know yet."""
        buffers, fresh, found = self.buffers, set(), []
        for chunk in chunks:
            held = chunk.pages
            if self._written[held.slot] is not held:
                fresh.add(id(held))
                for pool in POOLS:
                    found += [
                        (buffers.page_place(pool, held.slot, column), page)
                        for column, page in held.columns[pool].items()
                    ]
        for held, pool, column in growth.taken:
            if id(held) not in fresh:
                page = held.columns[pool][column]
                found.append((buffers.page_place(pool, held.slot, column), page))
        return found

    def _send(
        self,
        shape: Shape,
        chunks: Sequence[Chunk],
        counts: list[int],
        new_pages: list[tuple[int, int]],
    ) -> None:
        """Fill a step's line and start its copy to the device."""
        line = step_line(shape)
        at: dict[str, Any] = line.views(self.buffers.step.array())
        if len(new_pages) > len(at["places"]):  # a sequence starts from a long prefix
            pairs = torch.tensor(new_pages, dtype=torch.int64)
            if self.device.type == "cuda":
                pairs = pairs.pin_memory().to(self.device, non_blocking=True)
            self.buffers.slot_tables.pages[pairs[:, 0]] = pairs[:, 1]
            new_pages = []
        at["num_pages"][0] = len(new_pages)
        if new_pages:
            at["places"][: len(new_pages)], at["pages"][: len(new_pages)] = zip(
                *new_pages, strict=True
            )
        n = len(chunks)
        starts = [chunk.pages.length for chunk in chunks]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        columns = {
            "slots": [chunk.pages.slot for chunk in chunks],
            "starts": starts,
            "ends": ends,
        }
        for name, values in columns.items():
            at[name][:n] = values
            at[name][n:] = values[0] if shape.one_each else 0  # padding sequences have no tokens
        if shape.one_each:
            at["token_ids"][:n] = [chunk.token_ids[0] for chunk in chunks]
            at["token_ids"][n:] = chunks[0].token_ids[0]
        else:
            self._send_rows(at, shape, chunks, counts)
        self.buffers.step.send(line.length)

    def _send_rows(
        self, at: dict[str, Any], shape: Shape, chunks: Sequence[Chunk], counts: list[int]
    ) -> None:
        """Per-row values where sequences have several rows; padding is -1."""
        n, end = len(chunks), 0
        at["keep_ends"][:] = 0
        at["logits_rows"][:] = 0
        at["first_rows"][n:] = 0
        for place, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
            rows = slice(end, end + count)
            start = chunk.pages.length
            at["token_ids"][rows] = chunk.token_ids
            at["positions"][rows] = range(start, start + count)
            at["seq_idx"][rows] = place
            at["first_rows"][place] = end
            at["keep_ends"][place] = chunk.keep_len
            at["keep_rows"][place] = chunk.keep_row
            end += count
            at["logits_rows"][place] = end - 1
        at["token_ids"][end:] = -1
        at["positions"][end:] = -1
        at["seq_idx"][end:] = shape.sequences - 1

    def _inputs(self, chunks: Sequence[Chunk]) -> StepInputs:
        """For `step`: tables as wide as the longest sequence needs, rounded to fixed widths."""
        num_new = [len(chunk.token_ids) for chunk in chunks]
        starts = [chunk.pages.length for chunk in chunks]
        batch = make_ragged(starts, num_new, [c.pages.slot for c in chunks], self.device)
        rows: list[int] = []
        end = 0
        for chunk, count in zip(chunks, num_new, strict=True):
            end += count
            rows += range(end - chunk.num_logits, end)
        longest = max(start + count for start, count in zip(starts, num_new, strict=True))
        shape = self.buffers.shape(len(chunks), len(chunks), longest, one_each=True)
        tables = [
            [self.pages.table_row(chunk.pages, pool, table.shape[1]) for chunk in chunks]
            for pool, table in zip(POOLS, self.buffers.tables(shape), strict=True)
        ]
        window, csa, hca = map(self._ints, tables)
        return StepInputs(
            token_ids=self._ints([token for chunk in chunks for token in chunk.token_ids]),
            batch=batch,
            window_table=window,
            csa_table=csa,
            hca_table=hca,
            logits_rows=self._ints(rows),
        )

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    # --- before the first step ----------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture every shape of a step; then arm the guard."""
        buffers, graphs = self.buffers, Graphs()
        keys: list[Shape | int] = [*buffers.shapes(), *reversed(buffers.batches)]
        few, some = self.model.distinct()
        layers = [self.state.layers[i] for i in some]

        def compiled(key: Shape | int) -> None:
            with self.plan.recording(key):
                if isinstance(key, Shape):
                    forward(few, layers, buffers, key)
                else:
                    draw(buffers, key)

        warm_up(
            self.device,
            [partial(compiled, key) for key in keys],
            partial(graphs.capture, [(key, partial(self._run_once, key)) for key in keys]),
            len(keys),
            progress,
        )
        for line in self.plan.summary():
            log.info("%s", line)
        self._graphs = graphs
        self.costs = StepCosts.measure(buffers, self._run)
        self.state.load_copies()
        torch.topk(buffers.logits[0], 1)  # torch also loads its kernels on first use
        self.buffers.step.line.zero_()
        self.guard.arm()


def _numbered(name: str) -> torch.device:
    """The device with its index, as tensors report it: `cuda` is the current one."""
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)
