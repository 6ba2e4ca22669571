# mypy: ignore-errors
"""`query_prepare` fused into `attention`, where programs of few heads each take one tile: a program
prepares its own queries while its entries are in flight, with the tile and warps of `query_triton`,
which fix the order of a head's sum of squares. Also for unpacked entries (`prefill_gluon.py`),
where a program holds whole heads."""

from dataclasses import replace

from dsv4.ops.attention import attention_triton, query_triton
from dsv4.ops.core.launch import ROW_WARPS


def supports(queries, to) -> str | None:
    q = queries.q
    if queries.is_prepared:
        return "the queries are prepared"
    if q.shape[0] == 0 or q.shape[2] & (q.shape[2] - 1) or q.shape[2] > 512:
        return f"q has shape {tuple(q.shape)}"
    config = attention_triton.choose_variant(q, to)
    if not (config.split or config.unpacked):
        return "many programs would prepare the same queries"
    reason = query_triton.supports(q, to.batch.positions, to.frequencies)
    return reason or attention_triton.supports(q, to)


def variant(queries, to) -> str:
    return attention_triton.variant(queries.q, to)


def compile_others(queries, to) -> None:
    attention_triton.compile_others(queries.q, to, queries.eps)


def run(queries, to):
    config = attention_triton.choose_variant(queries.q, to)
    if config.heads == query_triton.HEADS:  # more heads: 512 channels, summed the same by 8 warps
        config = replace(config, num_warps=ROW_WARPS)
    return attention_triton.run(queries.q, to, config, queries.eps)
