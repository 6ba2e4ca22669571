"""Attention over window and compressed entries, differentiable and without row tiles.

Row lengths are multiples of the window. Queries in one block of `window` tokens attend to the keys
of their own and the previous block; compressed entries join the same softmax. Selection is a mask:
every score is computed, which at this size is cheaper than gathering.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NEG = float("-inf")


@dataclass(frozen=True)
class Index:
    """The indexer's queries `[B, S, h, d]`, keys `[B, N, d]` and weights `[B, S, h]`."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    topk: int
    select: bool  # whether attention is limited to the selection
    emphasis: Tensor | None  # [B, S], how much a query counts in the indexer's loss; None: no loss


def window_blocks(keys: Tensor, window: int) -> Tensor:
    """`[B, S, d]` -> `[B, blocks, 2 * window, d]`: the previous block's keys, then its own."""
    blocks = keys.unflatten(1, (-1, window))
    before = F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((before, blocks), dim=2)


def window_mask(
    num_blocks: int, first: int, window: int, reach: int, device: torch.device
) -> Tensor:
    """Visible window keys, `[blocks, window, 2 * window]`, for blocks `first ...`.

    `reach`: how many keys a query sees; the window's size, unless it is wrong on purpose.
    """
    query = torch.arange(window, device=device)[:, None] + window
    key = torch.arange(2 * window, device=device)[None]
    near = (key <= query) & (query - key < reach)
    block = torch.arange(first, first + num_blocks, device=device)[:, None, None]
    return near & ((block > 0) | (key >= window))


def index_scores(index: Index, keys: Tensor) -> Tensor:
    """`[B, S, N]` fp32."""
    batch, length, heads, dim = index.queries.shape
    dots = index.queries.reshape(batch, length * heads, dim) @ keys.transpose(1, 2)
    dots = dots.view(batch, length, heads, -1).relu()
    return (dots * index.weights.to(dots.dtype).unsqueeze(-1)).sum(2, dtype=torch.float32)


def top_mask(scores: Tensor, topk: int) -> Tensor:
    """True at the `topk` best of each row; the lower index wins a tie (exactly so on a CPU)."""
    count = min(topk, scores.shape[-1])
    if scores.device.type == "cpu":
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def index_loss(target: Tensor, scores: Tensor, visible: Tensor, emphasis: Tensor) -> Tensor:
    """Summed (loss, weight): how far the indexer's softmax is from the attention mass.

    A query is weighted by its total mass on compressed entries.
    """
    mass = target.sum(-1)
    share = target / mass.clamp(min=1e-9).unsqueeze(-1)
    shown = visible.any(-1, keepdim=True)
    wanted = scores.masked_fill(~visible & shown, NEG).log_softmax(-1)
    wanted = wanted.masked_fill(~visible, 0.0)
    gap = share * (share.clamp(min=1e-9).log() - wanted)
    weight = mass * emphasis
    return torch.stack(((gap.sum(-1) * weight).sum(), weight.sum()))


def attend(
    q: Tensor,
    sink: Tensor,
    blocks: Tensor,
    entries: Tensor | None,
    ratio: int,
    first: int,
    index: Index | None,
    reach: int,
) -> tuple[Tensor, Tensor]:
    """Queries `[B, C, H, d]` from token `first` on -> output of the same shape, index loss."""
    batch, length, heads, dim = q.shape
    window = blocks.shape[2] // 2
    count = length // window
    rows = q.view(batch, count, window * heads, dim) * dim**-0.5
    near = (rows @ blocks.transpose(2, 3)).view(batch, count, window, heads, -1)
    mask = window_mask(count, first // window, window, reach, q.device)
    near = near.masked_fill(~mask[None, :, :, None], NEG).flatten(1, 2)  # [B, C, H, 2w]
    column = sink.to(near.dtype).view(1, 1, heads, 1).expand(batch, length, heads, 1)
    loss = q.new_zeros(2, dtype=torch.float32)
    if entries is None:
        weights = torch.cat((column, near), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        return _window_sum(weights[..., 1:], blocks, q), loss
    far = (rows.view(batch, -1, dim) @ entries.transpose(1, 2)).view(batch, length, heads, -1)
    position = torch.arange(first, first + length, device=q.device)
    number = torch.arange(entries.shape[1], device=q.device)
    visible = (number < ((position + 1) // ratio)[:, None])[None, :, None]  # [1, C, 1, N]
    far = far.masked_fill(~visible, NEG)
    used = far
    if index is not None:
        scores = index_scores(index, index.keys)
        shown = visible[:, :, 0].expand(batch, -1, -1)
        if index.emphasis is not None:
            with torch.no_grad():
                dense = torch.cat((column, near, far), -1).softmax(-1, dtype=torch.float32)
                target = dense[..., 1 + 2 * window :].mean(2)
            loss = index_loss(target, scores, shown, index.emphasis)
        if index.select:
            kept = top_mask(scores.detach().masked_fill(~shown, NEG), index.topk)
            used = far.masked_fill(~kept.unsqueeze(2), NEG)
    weights = torch.cat((column, near, used), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    _, near_weights, far_weights = weights.split((1, 2 * window, far.shape[-1]), -1)
    out = _window_sum(near_weights, blocks, q)
    far_rows = far_weights.reshape(batch, length * heads, -1)
    return out + (far_rows @ entries).view(q.shape), loss


def _window_sum(weights: Tensor, blocks: Tensor, q: Tensor) -> Tensor:
    batch, count = blocks.shape[:2]
    return (weights.reshape(batch, count, -1, blocks.shape[2]) @ blocks).view(q.shape)


def attention_rows(
    q: Tensor,
    sink: Tensor,
    keys: Tensor,
    entries: Tensor | None,
    ratio: int,
    window: int,
    index: Index | None,
    most_scores: int = 1 << 28,
    *,
    reach: int,
) -> tuple[Tensor, Tensor]:
    """All queries of the rows, in chunks that are recomputed in the backward pass."""
    batch, length, heads, _ = q.shape
    blocks = window_blocks(keys, window)
    width = 2 * window + (0 if entries is None else entries.shape[1])
    size = max(window, most_scores // (batch * heads * width) // window * window)
    if size >= length:
        return attend(q, sink, blocks, entries, ratio, 0, index, reach)
    outs, losses = [], []
    for start in range(0, length, size):
        stop = min(start + size, length)
        part = slice(start, stop)
        seen = None if entries is None else entries[:, : max(stop // ratio, 1)]
        chunk = None
        if index is not None:
            assert seen is not None
            chunk = Index(
                index.queries[:, part],
                index.keys[:, : seen.shape[1]],
                index.weights[:, part],
                index.topk,
                index.select,
                None if index.emphasis is None else index.emphasis[:, part],
            )
        out, loss = checkpoint(
            attend,
            q[:, part],
            sink,
            blocks[:, start // window : stop // window],
            seen,
            ratio,
            start,
            chunk,
            reach,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outs.append(out)
        losses.append(loss)
    return torch.cat(outs, 1), torch.stack(losses).sum(0)
