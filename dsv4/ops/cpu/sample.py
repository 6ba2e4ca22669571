"""`sample` of few rows on a CPU."""

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.cpu.arrays import Array, fp32, tensor
from dsv4.ops.sample.random import _MASK, _MULTIPLIERS, _WEYL
from dsv4.ops.sample.sample import SampleInputs, _adjusted, _kept, sample_reference

SURELY_KEPT = 10.0  # a token this close to the best is in no tail that rounding could drop


def sample(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """Without top-k, top-p and min-p the draw needs no sorting: all tokens pass, except that
    rounding may drop some at the far end; a check shows that the drawn token is not there."""
    rows = logits.shape[0]
    if rows > ROW_TILE:
        return sample_reference(logits, inputs)
    tokens, norms = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    drawn = [i for i, value in enumerate(inputs.temperature.tolist()) if value > 0]
    noise = dict(zip(drawn, _gumbel(inputs, drawn, logits.shape[1]), strict=True))
    filtered = zip(inputs.top_k.tolist(), inputs.top_p.tolist(), inputs.min_p.tolist(), strict=True)
    for i, (raw, (top_k, top_p, min_p)) in enumerate(zip(logits, filtered, strict=True)):
        norms[i] = torch.logsumexp(raw, dim=0)
        if not norms[i].isfinite():
            tokens[i] = -1
            continue
        row = _adjusted(raw, inputs, i)
        if i not in noise:
            tokens[i] = int(row.numpy().argmax())
            continue
        row = row / inputs.temperature[i]
        token = int((row + noise[i]).numpy().argmax())
        has_filter = top_k > 0 or top_p < 1 or min_p > 0
        if has_filter or not row[token] > row.max() - SURELY_KEPT:
            row = torch.where(_kept(row, inputs, i), row + noise[i], float("-inf"))
            token = int(row.numpy().argmax())
        tokens[i] = token
    return tokens, norms


def _gumbel(inputs: SampleInputs, rows: list[int], size: int) -> list[Tensor]:
    """Gumbel noise for each of `rows`."""
    if not rows:
        return []
    seeds, positions = (x.numpy()[rows][:, None] for x in (inputs.seeds, inputs.positions))
    uniform = tensor(uniform_rows(seeds.view(np.uint64), positions.astype(np.uint64), size))
    return list(-torch.log(-torch.log(uniform)))


def uniform_rows(seeds: Array, positions: Array, size: int) -> Array:
    """`random.uniform_rows` in unsigned integers, `[rows, 1]` each."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    first, second = (np.uint64(m) for m in _MULTIPLIERS)
    blocks = np.arange(-(-size // 4), dtype=np.uint64)
    c0: Array = np.broadcast_to(blocks, (len(seeds), len(blocks)))
    c1: Array = positions & mask
    c2: Array = np.uint64(0)
    c3: Array = c2
    k0, k1 = seeds & mask, seeds >> half
    for _ in range(10):
        left, right = first * c0, second * c2
        c0, c1, c2, c3 = right >> half ^ c1 ^ k0, right & mask, left >> half ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    words = np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).reshape(len(seeds), -1)
    uniform = (words[:, :size] >> np.uint64(9)).astype(np.float32)
    uniform += fp32(0.5)
    uniform *= fp32(2.0**-23)
    return uniform
