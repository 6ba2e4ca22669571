# mypy: ignore-errors
"""`query_prepare` fused into `attention`, where programs of few heads each take one tile: a program
prepares its own queries while its entries are in flight, with the tile and warps of `query_triton`,
which fix the order of a head's sum of squares. Also for unpacked entries (`prefill_gluon.py`),
where a program holds whole heads."""

from dataclasses import replace

from dsv4.ops.attention import attention_triton, query_triton
from dsv4.ops.core.launch import ROW_WARPS


def supports(q, eps, **attention) -> str | None:
    frequencies, positions = attention["frequencies"], attention["batch"].positions
    if q.shape[0] == 0 or q.shape[2] & (q.shape[2] - 1) or q.shape[2] > 512:
        return f"q has shape {tuple(q.shape)}"
    config = _config(q, attention)
    if not (config.split or config.unpacked):
        return "many programs would prepare the same queries"
    return query_triton.supports(q, positions, frequencies) or attention_triton.supports(
        q, **attention
    )


def _config(q, attention) -> attention_triton.AttentionVariant:
    names = ("pool", "table", "compressed", "window")
    places = (attention[name] for name in names)
    return attention_triton.choose_variant(q, *places, 2 * attention["frequencies"].shape[0])


def variant(q, eps, **attention) -> str:
    return str(_config(q, attention))


def compile_others(q, eps, **attention) -> None:
    attention_triton.compile_others(q, **attention, eps=eps)


def run(q, eps, **attention):
    config = _config(q, attention)
    if config.heads == query_triton.HEADS:  # more have 512 channels, summed equally by 8 warps
        config = replace(config, num_warps=ROW_WARPS)
    return attention_triton.run(q, **attention, config=config, eps=eps)
