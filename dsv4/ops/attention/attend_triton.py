# mypy: ignore-errors
"""`query_prepare` inside `attention`, where programs of few heads each take one tile: a program
prepares its own queries while its entries are on the way, in the tile of `query_triton`, so with
its bits: a row of up to 512 channels is summed by one or two warps, however many there are."""

from dsv4.ops.attention import attention_triton, query_triton


def supports(q, eps, **attention) -> str | None:
    frequencies, positions = attention["frequencies"], attention["batch"].positions
    if q.shape[0] == 0 or q.shape[2] & (q.shape[2] - 1) or q.shape[2] > 512:
        return f"q has shape {tuple(q.shape)}"
    names = ("pool", "table", "compressed", "window")
    places = (attention[name] for name in names)
    config = attention_triton.config_of(q, *places, 2 * frequencies.shape[0])
    if config.heads != query_triton.HEADS or not config.split:
        return "many programs would prepare the same queries"
    return query_triton.supports(q, positions, frequencies) or attention_triton.supports(
        q, **attention
    )


def run(q, eps, **attention):
    return attention_triton.run(q, **attention, eps=eps)
