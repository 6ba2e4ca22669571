"""A step in two parts, each a pure function of `StepBuffers`: tokens to logits, logits to tokens.

Everything that varies is read from the buffers, and a sampled token is written where the next step
reads its input. On a GPU each part is captured once per shape and replayed; on a CPU the same
functions simply run. The host can intervene only between the two: a guide's mask depends on the
previous token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS
from dsv4.cache.kinds import LayerState
from dsv4.cache.pages import StatePages
from dsv4.model.inputs import HomeRows, StepInputs
from dsv4.model.transformer import DraftTaps, Transformer
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.kv.begin_step import StepStart, begin_step
from dsv4.ops.sample.accept import Sampled, accept
from dsv4.ops.sample.draft_rows import SentDrafts, draft_rows
from dsv4.ops.sample.sample import sample
from dsv4.ops.sample.verify import DrawnRows
from dsv4.ops.sample.verify import verify as count_drafts
from dsv4.runner.buffers import StepBuffers
from dsv4.runner.step.line import Chunk, order_of_logits, step_line
from dsv4.runner.step.shape import StepShape


def forward(
    model: Transformer,
    state: Sequence[LayerState],
    buffers: StepBuffers,
    shape: StepShape,
    taps: DraftTaps | None = None,
) -> None:
    """No data-dependent branch, no wait, no allocation that outlives the step. `taps`: take the
    values of the rows that a drafter reads."""
    at = step_line(shape).views(buffers.step.line)
    inputs, verify = buffers.inputs(shape), buffers.verify
    sent, seq_idx, token_ids = at["token_ids"], inputs.batch.seq_idx, inputs.token_ids
    if shape.width > 1:
        assert verify is not None
        drafts = SentDrafts(
            sent=sent.view(shape.sequences, shape.width), starts=at["starts"], most=at["most"],
            slots=at["slots"], newest=buffers.newest, lengths=verify.lengths,
            drafts=verify.drafts, vocab_size=buffers.vocab_size,
        )  # fmt: skip
        draft_rows(drafts, verify.laid_out(shape))
        # `draft_rows` has already filled the rows; only the page tables remain
        sent, seq_idx = at["slots"], buffers.rows[: shape.sequences]
        token_ids = verify.unused[: shape.sequences]
    begin_step(StepStart(
        tables=buffers.slot_tables, places=at["places"], pages=at["pages"],
        num_pages=at["num_pages"], sent=sent, seq_idx=seq_idx, slots=at["slots"],
        newest=buffers.own_newest, token_ids=token_ids, rows=buffers.tables(shape),
    ))  # fmt: skip
    logits = model.run_stage(inputs, state, None if shape.scored else taps)
    logits_of(buffers, shape)[: logits.shape[0]].copy_(logits)


def logits_of(buffers: StepBuffers, shape: StepShape) -> Tensor:
    """Where a step's logits are: one row per token or sequence."""
    if shape.width > 1:
        assert buffers.verify is not None
        return buffers.verify.logits[: shape.tokens]
    return buffers.scores if shape.scored else buffers.logits[: shape.num_logits]


def sample_tokens(buffers: StepBuffers, rows: int) -> None:
    """Sample one token for each of the first rows of logits."""
    logits, inputs = buffers.logits[:rows], buffers.sampling(rows)
    tokens, norms = sample(logits, inputs)
    accept(tokens, logits, norms, inputs.slots, inputs.flags, buffers.results(rows))


def sample_verified(buffers: StepBuffers, shape: StepShape) -> None:
    """Sample every row of a verify step and count the accepted drafts. The host has sent settings
    per sequence, not per row. Only for rows without penalties and guides: these depend on the
    tokens before, which are still drafts."""
    verify = buffers.verify
    assert verify is not None
    inputs, at = buffers.inputs(shape), verify.laid_out(shape)
    batch, rows = inputs.batch, shape.tokens
    logits, settings = verify.logits[:rows], buffers.row_settings(shape, batch)
    tokens, norms = sample(logits, settings)
    target = Sampled(
        buffers.newest, verify.sampled[:rows], verify.chosen[:rows], verify.norms[:rows], None
    )
    # `verify` tells slots their newest token
    accept(tokens, logits, norms, verify.nowhere[:rows], settings.flags, target)
    count_drafts(DrawnRows(
        tokens=verify.sampled[:rows], inputs=at.token_ids[:rows], first_rows=at.first_rows,
        starts=at.starts, ends=at.ends, slots=batch.slots, width=shape.width,
        counts=verify.counts[: shape.sequences], newest=buffers.newest, lengths=verify.lengths,
        follows=verify.follows[:, : shape.sequences],
    ))  # fmt: skip


def share(model: Transformer, buffers: StepBuffers) -> None:
    """Send rank 0's newest tokens to all ranks: a step may be queued before the host knows them."""
    model.exchange.comm.share(buffers.newest)


def score_lines(
    chunks: Sequence[Chunk],
    by_home: Sequence[Sequence[int]],
    pages: StatePages,
    buffers: StepBuffers,
) -> list[tuple[list[int], Any]]:
    """Inputs of `score` at each home: (sequences, table widths, then starts, counts, slots and
    logits per sequence, then with several homes the rows of each, their rows of logits and the
    order of these) and a line of token ids and page tables. Tables are as wide as the longest
    sequence needs, rounded up to fixed widths."""
    longest = max(chunk.pages.length + len(chunk.token_ids) for chunk in chunks)
    shape = buffers.shape(len(chunks), len(chunks), longest, one_each=True)
    widths, tail = [table.shape[1] for table in buffers.tables(shape)], list[int]()
    if len(by_home) > 1:
        logits = [sum(chunks[i].num_logits for i in own) for own in by_home]
        tail = [sum(len(chunks[i].token_ids) for i in own) for own in by_home] + logits
        tail += order_of_logits(by_home, [chunk.num_logits for chunk in chunks], max(logits))
    found = []
    for own in ([chunks[i] for i in places] for places in by_home):
        line = [token for chunk in own for token in chunk.token_ids]
        for pool, width in zip(POOLS, widths, strict=True):
            for chunk in own:
                line += pages.table_row(chunk.pages, pool, width)
        numbers = [len(own), *widths, *(chunk.pages.length for chunk in own)]
        numbers += [len(chunk.token_ids) for chunk in own]
        numbers += [chunk.pages.slot % buffers.own_sequences for chunk in own]
        numbers += [chunk.num_logits for chunk in own]
        found.append((numbers + tail, np.array(line, dtype=np.int64)))
    return found


def score(
    model: Transformer,
    state: Sequence[LayerState],
    numbers: Sequence[int],
    line: Any,
    device: torch.device,
) -> Tensor:
    """Logits of any rows of any chunks, one launch at a time, from what `score_lines` returns."""
    n, widths = numbers[0], numbers[1:4]
    starts, counts, slots, logits = (list(numbers[4 + n * i : 4 + n * (i + 1)]) for i in range(4))
    rows: list[int] = []
    end = 0
    for count, wanted in zip(counts, logits, strict=True):
        end += count
        rows += range(end - wanted, end)
    values = torch.from_numpy(np.array(line)).to(device)
    token_ids, *tables = torch.split(values, [end, *(n * width for width in widths)])
    sized = zip(tables, widths, strict=True)
    window, csa, hca = (table.view(n, width) for table, width in sized)
    tail, homes = numbers[4 + 4 * n :], model.exchange.layout.homes
    inputs = StepInputs(
        token_ids=token_ids,
        batch=make_ragged(starts, counts, slots, device),
        window_table=window,
        csa_table=csa,
        hca_table=hca,
        logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        homes=HomeRows(
            tuple(tail[:homes]),
            tuple(tail[homes : 2 * homes]),
            torch.tensor(tail[2 * homes :], dtype=torch.int64, device=device),
        )
        if tail
        else None,
    )
    return model(inputs, state)
