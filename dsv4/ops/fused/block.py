"""Parts of a block that may run fused across op families: one typed function per place.

Each tries its fusion and otherwise runs the ops one by one; the bits are the same. With
low-precision activations a row is quantised where it is computed, so the following products belong
to the fusion. `mhc_boundary` may receive a row as partial sums, which it reduces itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight
from dsv4.ops.attention.attention import Visible, attention
from dsv4.ops.attention.index import index_scores, index_select
from dsv4.ops.attention.query import index_query, query_prepare
from dsv4.ops.core.op import Arguments, Fusion, Kernel
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.kv.compress import Compression, compress
from dsv4.ops.kv.kv_store import WindowKey, kv_store
from dsv4.ops.kv.pool import PagedPool
from dsv4.ops.mhc.mix import MixSite, mhc_boundary, mhc_pre
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.ops.moe.router import Gate, router
from dsv4.ops.norm.rms_norm import rms_norm


def _fusion(module: str, *ops: str, reader: str = "") -> Fusion:
    return Fusion(ops, Kernel(f"dsv4.ops.fused.{module}_triton"), reader)


MIX_LINEAR = _fusion("mix_scaled", "mhc_pre", "mhc_boundary", "linear")
MIX_EXPERTS = _fusion("mix_scaled", "mhc_boundary", "router", "experts")
ROUTER_EXPERTS = _fusion("router_experts", "router", "experts", reader="mhc_boundary")
LINEAR_PARTIAL_SUMS = _fusion("linear_partial_sums", "linear", reader="mhc_boundary")
NORM_STORE = _fusion("norm_store", "rms_norm", "kv_store", "compress")
STORE_LINEAR = _fusion("norm_linear_scaled", "rms_norm", "kv_store", "compress", "linear")
NORM_LINEAR = _fusion("norm_linear_scaled", "rms_norm", "linear")
QUERY_AND_INDEX = _fusion("query_and_index", "query_prepare", "index_query")
SCORE_SELECT = _fusion("score_select", "index_scores", "index_select")
QUERY_ATTENTION = _fusion("attention_with_queries", "query_prepare", "attention")

Mixed = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # streams, post, comb, products


@dataclass(frozen=True)
class Update:
    """A half-block's result, `[tokens, size]`, and how to spread it over the streams."""

    y: Tensor | PartialSums
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class Residual:
    """The streams `[tokens, streams, size]` and their pending update, if any."""

    streams: Tensor
    update: Update | None = None


@dataclass(frozen=True)
class Queries:
    """`[tokens, heads, dim]`; as projected unless `is_prepared`. `eps` belongs to their norm."""

    q: Tensor
    eps: float
    is_prepared: bool = False


def _mix(residual: Residual, site: MixSite) -> Arguments:
    update = {} if residual.update is None else vars(residual.update)
    return {"streams": residual.streams, **update, "site": site}


def collapse(residual: Residual, site: MixSite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> updated streams, the row they collapse into, normalised, post, comb."""
    streams, update = residual.streams, residual.update
    if update is None:
        return (streams, *mhc_pre(streams, site))
    return mhc_boundary(streams, update.y, update.post, update.comb, site)


def mix_linear(
    residual: Residual, site: MixSite, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]
) -> Mixed:
    """Collapse the streams into a row, then apply the matrices that read it, each in its dtype."""

    def one_by_one() -> Mixed:
        streams, x, post, comb = collapse(residual, site)
        return streams, post, comb, linear_multi(x, weights, dtypes)

    products = {"weights": weights, "out_dtypes": dtypes}
    together = {"mix": _mix(residual, site), "linear": products}
    return MIX_LINEAR(residual.streams.device, together, one_by_one)


def mix_experts(
    residual: Residual, site: MixSite, token_ids: Tensor, gate: Gate, experts: Experts
) -> Residual:
    """Collapse the streams into a row, then run router and experts: a whole half-block."""
    choice, matrices = {**vars(gate), "token_ids": token_ids}, vars(experts)

    def route(x: Tensor) -> Tensor | PartialSums:
        chosen, weights = router(x, token_ids, gate)
        return experts_ffn(x, chosen, weights, experts)

    def one_by_one() -> tuple[Tensor, Tensor, Tensor, Tensor | PartialSums]:
        streams, x, post, comb = collapse(residual, site)
        together = {"router": {**choice, "x": x}, "experts": matrices}
        return streams, post, comb, ROUTER_EXPERTS(x.device, together, lambda: route(x))

    together = {"mix": _mix(residual, site), "router": choice, "experts": matrices}
    streams, post, comb, y = MIX_EXPERTS(token_ids.device, together, one_by_one)
    return Residual(streams, Update(y, post, comb))


def store_and_query(
    latent: Tensor,
    norm: Tensor,
    weights: Sequence[Weight],
    key: WindowKey,
    blocks: Sequence[Compression],
) -> list[Tensor]:
    """Store key and blocks; normalise the latent and multiply it with `weights`."""
    latent_norm = {"x": latent, "weight": norm, "eps": key.eps}
    products = {"weights": weights, "out_dtypes": [latent.dtype] * len(weights)}
    store = {"norm": latent_norm, "key": vars(key), "blocks": [vars(block) for block in blocks]}

    def apart() -> list[Tensor]:
        kv_store(key)
        for block in blocks:
            compress(block)
        together = {"norm": latent_norm, "linear": products}
        return NORM_LINEAR(
            latent.device, together, lambda: linear_multi(rms_norm(latent, norm, key.eps), weights)
        )

    def stored() -> list[Tensor]:
        if not NORM_STORE.accepts(latent.device, store):
            return apart()
        return linear_multi(NORM_STORE.run(store), weights)

    return STORE_LINEAR(latent.device, {**store, "linear": products}, stored)


def prepare_queries(
    queries: Queries,
    index_q: Tensor,
    head_weights: Tensor,
    scale: float,
    positions: Tensor,
    frequencies: Tensor,
    index_format: str,
) -> tuple[Queries, Tensor, Tensor]:
    """Prepare projected index queries `[tokens, index heads, dim]` and their head weights (fp32).
    Attention's queries may be prepared too, or left unchanged."""
    turned = {"positions": positions, "frequencies": frequencies}
    query = {"q": queries.q, **turned, "eps": queries.eps}
    index = {"q": index_q, **turned, "index_format": index_format}
    together = {"query": query, "index": index, "weights": head_weights, "scale": scale}
    if QUERY_AND_INDEX.accepts(index_q.device, together):
        q, index_q, head_weights = QUERY_AND_INDEX.run(together)
        return Queries(q, queries.eps, is_prepared=True), index_q, head_weights
    index_q = index_query(index_q, positions, frequencies, index_format)
    return queries, index_q, head_weights * scale


def score_select(
    q: Tensor, weights: Tensor, pool: PagedPool, table: Tensor, batch: Ragged, topk: int
) -> Tensor:
    """Prepared index queries and weights -> each token's entries, as from `index_select`."""
    places = {"q": q, "weights": weights, "pool": pool, "table": table, "batch": batch}

    def one_by_one() -> Tensor:
        return index_select(index_scores(q, weights, pool, table, batch, topk), topk)

    return SCORE_SELECT(q.device, {**places, "topk": topk}, one_by_one)


def query_attention(queries: Queries, to: Visible) -> Tensor:
    """`attention` of queries that may have to be prepared."""
    q, eps = queries.q, queries.eps
    if queries.is_prepared:
        return attention(q, to)

    def one_by_one() -> Tensor:
        return attention(query_prepare(q, to.batch.positions, to.frequencies, eps), to)

    return QUERY_ATTENTION(q.device, {"q": q, "eps": eps, **vars(to)}, one_by_one)


def linear_partial_sums(x: Tensor, weight: Weight) -> Tensor | PartialSums:
    """Like `linear`, for a consumer that accepts partial sums."""
    return LINEAR_PARTIAL_SUMS(x.device, {"x": x, "weight": weight}, lambda: linear(x, weight))
