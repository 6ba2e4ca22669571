"""Token embedding, copied into each of the residual streams."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape


def embed_reference(
    token_ids: Tensor, table: Tensor, num_streams: int, dtype: torch.dtype
) -> Tensor:
    rows = table[token_ids.clamp(min=0)].to(dtype)  # padding reads any row
    return rows.unsqueeze(1).repeat(1, num_streams, 1)


def cases() -> Iterable[Case]:
    def build(tokens: int, size: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            return {
                "token_ids": torch.randint(0, 50, (tokens,), generator=generator),
                "table": torch.randn(50, size, generator=generator),
                "num_streams": 4,
                "dtype": torch.float32,
            }

        return Case(f"{tokens} tokens of {size}", make, 0.0, 0.0)

    yield build(5, 64)
    yield build(1, 63)
    yield build(0, 64)


OP = Op("embed", embed_reference, cases, (Kernel("dsv4.ops.gemm.embed_triton"),))


def embed(token_ids: Tensor, table: Tensor, num_streams: int, dtype: torch.dtype) -> Tensor:
    """`[tokens] -> [tokens, streams, size]`; ids must be inside the table."""
    check_shape(OP.name, "token_ids", token_ids, "tokens")
    check_shape(OP.name, "table", table, "ids", "size")
    if token_ids.shape[0] == 0:
        return table.new_empty(0, num_streams, table.shape[1], dtype=dtype)
    return OP(table.device, token_ids=token_ids, table=table, num_streams=num_streams, dtype=dtype)
