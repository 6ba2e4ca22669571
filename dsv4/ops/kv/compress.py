"""Compressor: every `ratio` tokens become one entry, written to its page when the block closes.

A token contributes values V and gates Z (`ape` is added to the gate only). An entry is, per
channel, the softmax of the gates over its tokens applied to their values; then norm, rope at the
block's first token, storage format.

ratio 128  the block's own 128 tokens.
ratio 4    eight slots: the second half of the channels of the block's own tokens, and the first
           half of the channels of the previous block's tokens (absent for the first block).

State per sequence: the last 16 (ratio 4) or 128 tokens' V and Z, token `p` in row `p % rows`. An
entry of ratio 4 reads 8 of them; with 16, rejected drafts overwrite no row that is still read.
A block closes exactly at tokens with `(p + 1) % ratio == 0`, without a host branch.

Prefixes are kept at multiples of 128, where with ratio 4 the next block still reads the first half
of the channels of the four preceding tokens. `batch.keep` requests these for a boundary inside the
step's tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.formats.entry import index_entry, kv_entry
from dsv4.formats.spec import CSA_ROWS
from dsv4.ops.core.batch_invariance import softmax
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.core.ragged import Ragged, make_ragged
from dsv4.ops.kv.pool import PagedPool, allocate_pool, locate, store
from dsv4.ops.kv.rope import rope_frequencies, rope_reference
from dsv4.ops.norm.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class CompressorState:
    """V and Z (fp32) of the newest tokens, `[slots, rows, width]` each; with ratio 4 also the rows
    that cached prefixes carry over their boundary, `[prefixes, 4, width / 2]`."""

    values: Tensor
    gates: Tensor
    kept_values: Tensor | None = None
    kept_gates: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True)
class Compression:
    """`values`, `gates` `[tokens, width]` fp32; `dtype`: the activation dtype that an entry is
    rounded to before its norm. `state` and `pool` are written in place."""

    values: Tensor
    gates: Tensor
    ape: Tensor
    norm: Tensor
    frequencies: Tensor
    eps: float
    ratio: int
    dtype: torch.dtype
    state: CompressorState
    batch: Ragged
    pool: PagedPool
    table: Tensor


def overlaps(ratio: int) -> bool:
    """Whether an entry also reads the previous block; its projections are then twice as wide."""
    return ratio == 4


def state_rows(ratio: int) -> int:
    return CSA_ROWS if overlaps(ratio) else ratio


def reduce_block(values: Tensor, gates: Tensor) -> Tensor:
    """`[blocks, slots, dim]` twice -> `[blocks, dim]`: softmax over slots, per channel."""
    weights = softmax(gates, dim=1)
    return (weights * values).sum(1)


def _gather(new: Tensor, old: Tensor, batch: Ragged, seq: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the tokens at `tokens` `[blocks, n]`: from this step, otherwise from the state."""
    start = batch.starts[seq].unsqueeze(1)
    rows = batch.first_rows[seq].unsqueeze(1) + tokens - start
    is_new = (tokens >= start).unsqueeze(-1)
    from_state = old[batch.slots[seq].unsqueeze(1), tokens % old.shape[1]]
    return torch.where(is_new, new[rows.clamp(0, new.shape[0] - 1)], from_state)


def _entries(block: Compression, gates: Tensor, closing: Tensor) -> Tensor:
    values, state, batch, ratio = block.values, block.state, block.batch, block.ratio
    seq, last = batch.seq_idx[closing], batch.positions[closing]
    first = (last + 1 - ratio).unsqueeze(1)
    own = first + torch.arange(ratio, device=last.device)
    v = _gather(values, state.values, batch, seq, own)
    z = _gather(gates, state.gates, batch, seq, own)
    if not overlaps(ratio):
        return reduce_block(v, z)
    dim = values.shape[1] // 2
    previous = own - ratio
    absent = (previous < 0).unsqueeze(-1)
    v_before = _gather(values, state.values, batch, seq, previous)[..., :dim]
    z_before = _gather(gates, state.gates, batch, seq, previous)[..., :dim]
    v_before = v_before.masked_fill(absent, 0.0)
    z_before = z_before.masked_fill(absent, float("-inf"))
    return reduce_block(
        torch.cat((v_before, v[..., dim:]), dim=1), torch.cat((z_before, z[..., dim:]), dim=1)
    )


def compress_reference(block: Compression) -> None:
    state, batch, ratio, pool = block.state, block.batch, block.ratio, block.pool
    positions, seq_idx, values = batch.positions, batch.seq_idx, block.values
    gates = block.gates + block.ape.index_select(0, positions % ratio)
    closing = torch.nonzero(((positions + 1) % ratio == 0) & (positions >= 0)).squeeze(1)
    if closing.numel():
        entries = _entries(block, gates, closing).to(block.dtype)
        entries = rms_norm_reference(entries, block.norm, block.eps)
        number = torch.div(positions[closing], ratio, rounding_mode="floor")
        entries = rope_reference(entries, number * ratio, block.frequencies, inverse=False)
        where = locate(block.table, seq_idx[closing], number, pool.page_entries)
        store(pool, *where, entries)
    if batch.keep is not None and state.kept_values is not None:
        _keep(values, gates, state, batch)
    rows = batch.slots.index_select(0, seq_idx) * state.rows + positions % state.rows
    if batch.num_tokens > state.rows or batch.is_padded:
        # Only the newest rows are kept; an older token of this step would map to the same row.
        newest = (positions >= batch.ends[seq_idx] - state.rows) & (positions >= 0)
        rows, values, gates = rows[newest], values[newest], gates[newest]
    state.values.view(-1, values.shape[1]).index_copy_(0, rows, values)
    state.gates.view(-1, gates.shape[1]).index_copy_(0, rows, gates)


def _keep(values: Tensor, gates: Tensor, state: CompressorState, batch: Ragged) -> None:
    assert batch.keep is not None
    assert state.kept_values is not None
    assert state.kept_gates is not None
    half = values.shape[1] // 2
    for seq in torch.nonzero(batch.keep.ends > 0).flatten().tolist():
        last = int(batch.first_rows[seq] + batch.keep.ends[seq] - batch.starts[seq])
        row = int(batch.keep.rows[seq])
        state.kept_values[row] = values[last - 4 : last, :half]
        state.kept_gates[row] = gates[last - 4 : last, :half]


def cases() -> Iterable[Case]:
    def build(
        ratio: int, dim: int, entry_format: str, is_index: bool, starts: list[int], new: list[int]
    ) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            count, width = len(starts), dim * (2 if overlaps(ratio) else 1)
            batch = make_ragged(starts, new, list(range(count))[::-1], torch.device("cpu"))
            shape = (count, state_rows(ratio), width)
            tables = -(-max(s + n for s, n in zip(starts, new, strict=True)) // (ratio * 4)) + 1
            parts = index_entry(entry_format, dim) if is_index else kv_entry(entry_format, dim, 16)
            block = Compression(
                values=torch.randn(batch.num_tokens, width, generator=generator),
                gates=torch.randn(batch.num_tokens, width, generator=generator) * 3,
                ape=torch.randn(ratio, width, generator=generator),
                norm=torch.rand(dim, generator=generator) + 0.5,
                frequencies=rope_frequencies(16, 10000.0),
                eps=1e-6,
                ratio=ratio,
                dtype=torch.float32,
                state=CompressorState(
                    torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
                ),
                batch=batch,
                pool=allocate_pool(entry_format, is_index, parts, (count * tables, 4), "cpu"),
                table=torch.randperm(count * tables, generator=generator).view(count, tables),
            )
            return {"block": block}

        kind = "index" if is_index else "kv"
        return Case(f"ratio {ratio} {kind} {entry_format} {starts}+{new}", make, 1e-2, 1e-2)

    yield build(4, 32, "fp32", False, [0], [1])
    yield build(4, 32, "fp32", False, [0, 3, 7], [4, 1, 10])
    yield build(4, 96, "fp8", False, [6, 122], [2, 19])
    yield build(4, 32, "fp4", True, [0, 5], [9, 3])
    yield build(4, 64, "fp8", True, [11], [1])
    yield build(128, 32, "fp32", False, [0, 127], [130, 1])
    yield build(128, 48, "bf16", False, [100, 256], [300, 5])


KERNELS, ON_CPU = (Kernel("dsv4.ops.kv.compress_triton"),), "dsv4.ops.cpu.kv"
OP = Op("compress", compress_reference, cases, KERNELS, ("block.state", "block.pool"), ON_CPU)


def compress(block: Compression) -> None:
    """Close the blocks that end in this step, then store the newest tokens in the state."""
    ratio, batch = block.ratio, block.batch
    check(ratio in (4, 128), OP.name, lambda: f"ratio is {ratio}, expected 4 or 128")
    width = block.norm.shape[0] * (2 if overlaps(ratio) else 1)
    for name, tensor in (("values", block.values), ("gates", block.gates)):
        check_shape(OP.name, name, tensor, batch.num_tokens, width)
        if tensor.dtype != torch.float32:
            raise KernelError(f"{OP.name}: {name} is {tensor.dtype}, expected float32")
    check_shape(OP.name, "ape", block.ape, ratio, width)
    check_shape(OP.name, "state", block.state.values, "slots", state_rows(ratio), width)
    if batch.num_tokens == 0:
        return
    OP(block.values.device, block=block)
