"""A step: work in, logits out. Holds the model and its state; knows nothing of requests."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, Pool
from dsv4.cache.pages import SequencePages, StatePages
from dsv4.cache.state import StateTensors
from dsv4.errors import KernelError
from dsv4.model.inputs import StepInputs
from dsv4.model.transformer import Transformer
from dsv4.ops.ragged import make_ragged
from dsv4.request import TokenLogprobs
from dsv4.runner.buffers import Bucket, DecodeBuffers
from dsv4.runner.decode import Decoder, Row, decode_step, samples_on_device
from dsv4.runner.graphs import Graphs
from dsv4.runner.guard import Guard
from dsv4.runner.settings import Settings
from dsv4.runner.warmup import Forms, Progress, warm_up
from dsv4.sampling import Draw, sample_batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence, and for how many of the last ones logits are wanted."""

    pages: SequencePages
    token_ids: list[int]
    num_logits: int

    @property
    def decodes(self) -> bool:
        return len(self.token_ids) == 1 and self.num_logits == 1


class Runner:
    def __init__(
        self, model: Transformer, settings: Settings, progress: Progress | None = None
    ) -> None:
        """With `cuda_graphs` the warm-up runs here; `progress` is told how far it is."""
        config = model.config
        self.model = model
        self.device = _numbered(settings.device)
        geometry = settings.geometry(config)
        num_pages = geometry.num_pages(
            settings.max_context, settings.max_sequences, settings.state_tokens
        )
        self.pages = StatePages(geometry, settings.max_sequences, num_pages)
        self.state = StateTensors(geometry, settings.max_sequences, num_pages, settings.device)
        self._buffers = DecodeBuffers(
            geometry, settings.max_sequences, settings.max_context, self.device
        )
        self.decoder = Decoder(self.pages, self._buffers, self._decode)
        self.guard = Guard(self.device)
        self._graphs: Graphs | None = None
        if settings.cuda_graphs:
            try:
                self.warm_up(settings.chunk_tokens, progress)
            except KernelError as error:
                log.warning("steps run one launch at a time, without graphs: %s", error)

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> Tensor:
        """Logits fp32 of the wanted tokens, `[rows, vocabulary]`, in the order of `chunks`.

        Pages are taken first; if they do not suffice, nothing has changed.
        """
        if self._graphs is not None and all(chunk.decodes for chunk in chunks):
            self.decoder.place([Row(chunk.pages, chunk.token_ids[0]) for chunk in chunks])
            self.decoder.submit()
            return self.decoder.logits()
        growth = self.pages.prepare([c.pages for c in chunks], [len(c.token_ids) for c in chunks])
        try:
            with self.guard.watch(decoding=False):
                logits = self.model(self._inputs(chunks), self.state.layers)
        except BaseException:
            self.pages.cancel(growth)
            raise
        self.pages.apply(growth)
        return logits

    @torch.inference_mode()
    def step_tokens(self, chunks: list[Chunk], draws: Sequence[Draw]) -> list[TokenLogprobs]:
        """`step` and the tokens drawn from its logits, one for each of `draws`.

        Where it can be, the draw is part of the step: no logits leave the GPU.
        """
        drawn_inside = self._graphs is not None and all(
            chunk.decodes for chunk in chunks
        ) and all(samples_on_device(draw.params) for draw in draws)  # fmt: skip
        if not drawn_inside:
            return sample_batch(self.step(chunks), draws)
        rows = zip(chunks, draws, strict=True)
        self.decoder.advance([Row(c.pages, c.token_ids[0], draw) for c, draw in rows])
        return self.decoder.read()

    def _decode(self, bucket: Bucket) -> None:
        with torch.inference_mode(), self.guard.watch(decoding=True):
            if self._graphs is None:
                self._decode_once(bucket)
            else:
                self._graphs.run(bucket)

    def _decode_once(self, bucket: Bucket) -> None:
        decode_step(self.model, self.state.layers, self._buffers, bucket)

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int, progress: Progress | None = None) -> None:
        """Before the first sequence: compile, run and capture every shape; then be strict."""
        graphs = Graphs(self._decode_once)
        warm_up(
            self._buffers,
            chunk_tokens,
            self._decode_once,
            self._dummy_prompt,
            graphs.capture,
            Forms(self.pages.geometry, self.model.dtype),
            progress,
        )
        self._graphs = graphs
        self.guard.arm()

    def _dummy_prompt(self, length: int, context: int, num_logits: int) -> None:
        """Tokens beyond a chunk come from other sequences that decode in the same step."""
        first = min(length, self.pages.geometry.chunk_tokens)
        lengths = [first, *[1] * (length - first)]
        held = [self.pages.open() for _ in lengths]
        growth = self.pages.prepare(held, lengths)
        wanted = [num_logits, *[1] * (length - first)]
        try:
            chunks = [
                Chunk(pages, [0] * count, rows)
                for pages, count, rows in zip(held, lengths, wanted, strict=True)
            ]
            self.model(self._inputs(chunks, context), self.state.layers)
        finally:
            self.pages.cancel(growth)
            for pages in held:
                self.pages.close(pages)

    def _inputs(self, chunks: list[Chunk], context: int = 1) -> StepInputs:
        """Tables as wide as the longest sequence needs, or `context`, in a few fixed widths."""
        num_new = [len(chunk.token_ids) for chunk in chunks]
        batch = make_ragged(
            [chunk.pages.length for chunk in chunks],
            num_new,
            [chunk.pages.slot for chunk in chunks],
            self.device,
        )
        rows: list[int] = []
        end = 0
        for chunk, count in zip(chunks, num_new, strict=True):
            end += count
            rows += range(end - chunk.num_logits, end)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        longest = max(c.pages.length + count for c, count in zip(chunks, num_new, strict=True))
        context = self._buffers.bucket(1, max(longest, context), False).context
        tables = {pool: self._table(chunks, pool, context) for pool in POOLS}
        return StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=self.device),
            batch=batch,
            window_table=tables["window"],
            csa_table=tables["csa"],
            hca_table=tables["hca"],
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=self.device),
        )

    def _table(self, chunks: list[Chunk], pool: Pool, context: int) -> Tensor:
        width = self._buffers.tables[context][pool].shape[1]
        rows = [self.pages.table_row(chunk.pages, pool, width) for chunk in chunks]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)


def _numbered(name: str) -> torch.device:
    """As tensors name their device: `cuda` means the current one."""
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)
