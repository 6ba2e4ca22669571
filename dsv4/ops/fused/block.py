"""Parts of a block that may run fused across op families: one typed function per place.

Each function runs its ops one by one. `_fused` names a kernel that may do the same in one
launch, with the same arguments and the same bits. `mhc_boundary` may receive a row as partial sums,
which it reduces itself.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from dsv4.formats.quantized import Weight
from dsv4.ops.attention.attention import Visible, attention
from dsv4.ops.attention.query import Queries, index_query, query_prepare
from dsv4.ops.core.op import Fusion, Kernel
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.kv.compress import Compression, compress
from dsv4.ops.kv.kv_store import WindowKey, kv_store
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.ops.moe.router import Gate, router
from dsv4.ops.norm.rms_norm import rms_norm

P = ParamSpec("P")
R = TypeVar("R")
ON_CPU = "dsv4.ops.cpu.block"


def _fused(
    kernel: str, *ops: str, reader: str = "", on_cpu: str = ""
) -> Callable[[Callable[P, R]], Fusion[P, R]]:
    module = Kernel(f"dsv4.ops.fused.{kernel}_triton")
    return lambda one_by_one: Fusion(one_by_one, ops, module, reader, on_cpu)


@_fused("router_experts", "router", "experts", reader="mhc_boundary", on_cpu=ON_CPU)
def router_experts(
    x: Tensor, token_ids: Tensor, gate: Gate, experts: Experts
) -> Tensor | PartialSums:
    chosen, weights = router(x, token_ids, gate)
    return experts_ffn(x, chosen, weights, experts)


@_fused("norm_store", "rms_norm", "kv_store", "compress", on_cpu=ON_CPU)
def norm_store(
    latent: Tensor, norm: Tensor, key: WindowKey, blocks: Sequence[Compression]
) -> Tensor:
    """Store key and blocks; normalise the latent."""
    kv_store(key)
    for block in blocks:
        compress(block)
    return rms_norm(latent, norm, key.eps)


@_fused("query_and_index", "query_prepare", "index_query")
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
    index_q = index_query(index_q, positions, frequencies, index_format)
    return queries, index_q, head_weights * scale


@_fused("attention_with_queries", "query_prepare", "attention", on_cpu=ON_CPU)
def query_attention(queries: Queries, to: Visible) -> Tensor:
    """`attention` of queries that may still need preparing."""
    q = queries.q
    if not queries.is_prepared:
        q = query_prepare(q, to.batch.positions, to.frequencies, queries.eps)
    return attention(q, to)


@_fused("output_rows", "grouped_linear", "linear")
def output_projections(x: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor | PartialSums:
    """Attention `[tokens, groups, k]` through both of its output matrices."""
    return linear_partial_sums(grouped_linear(x, wo_a), wo_b)


@_fused("linear_partial_sums", "linear", reader="mhc_boundary")
def linear_partial_sums(x: Tensor, weight: Weight) -> Tensor | PartialSums:
    """Like `linear`, for a consumer that accepts partial sums."""
    return linear(x, weight)
