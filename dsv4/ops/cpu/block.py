"""The fusions of `dsv4/ops/fused/block.py` for few rows on a CPU, in fp32, without the checks and
intermediate tensors of the single ops.

Each returns None for arguments that it does not support; then the ops run one by one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.attention.attention import HEAD_TILE, Visible
from dsv4.ops.attention.query import Queries
from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.cpu.arrays import fp32, norm_scratch, tensor, tile
from dsv4.ops.cpu.attention import softmax_over, tiles_of
from dsv4.ops.cpu.kv import compress, key_rows
from dsv4.ops.cpu.moe import route, sum_of_experts
from dsv4.ops.cpu.products import plain
from dsv4.ops.cpu.step import few_rows, rotate, rotation, store_rows
from dsv4.ops.kv.compress import Compression
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.router import Gate


def router_experts(x: Tensor, token_ids: Tensor, gate: Gate, experts: Experts) -> Tensor | None:
    count = x.shape[0]
    if x.dtype != torch.float32 or not 0 < count <= ROW_TILE or min(token_ids.tolist()) < 0:
        return None
    every = (experts.w13, experts.w2, experts.shared_w13, experts.shared_w2)
    if any(plain(weight) is None for weight in every):
        return None
    if experts.shared_w2.shape != experts.w2.shape[1:]:
        return None
    rows = tensor(tile(x.numpy()))
    chosen, weights = route(rows, count, token_ids, gate)
    return tensor(sum_of_experts({"a16": rows}, chosen, weights, experts, torch.float32))


def norm_store(
    latent: Tensor, norm: Tensor, key: WindowKey, blocks: Sequence[Compression]
) -> Tensor | None:
    if latent.dtype != torch.float32 or not few_rows(key.batch):
        return None
    keys = norm_scratch("key", *key.kv.shape)
    np.copyto(keys.rows, key.kv.numpy())
    keys(key.norm, key.eps)
    rotate(keys.out, rotation(key.batch.positions, key.frequencies))
    store_rows(key.pool, key_rows(key), keys.out, torch.float32)
    for block in blocks:
        compress(block)
    queries = norm_scratch("latent", *latent.shape)
    np.copyto(queries.rows, latent.numpy())
    queries(norm, key.eps)
    return tensor(queries.out.copy())


def query_attention(queries: Queries, to: Visible) -> Tensor | None:
    q, batch = queries.q, to.batch
    count, heads, size = q.shape
    is_other = queries.is_prepared or q.dtype != torch.float32 or heads % HEAD_TILE
    if is_other or not few_rows(batch):
        return None
    scratch = norm_scratch("query", count * heads, size)
    np.copyto(scratch.rows, q.numpy().reshape(count * heads, size))
    scratch(None, queries.eps)
    by, prepared = rotation(batch.positions, to.frequencies), scratch.tile[: count * heads]
    by_heads = prepared.view(q.shape)
    rotate(by_heads.numpy(), by)
    scratch.out *= fp32(size**-0.5)
    out = softmax_over(by_heads, torch.float32, to.sink, tiles_of(to))
    rotate(out, by, inverse=True)
    return tensor(out)
