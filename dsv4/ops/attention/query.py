"""Query preparation between projection and attention.

query_prepare   per head: RMS norm without weight, then rope
index_query     per index head: rope, then the same rotation and rounding as index keys
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.op import AnyOp, Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.kv.pool import round_trip_index
from dsv4.ops.kv.rope import check_rotation, rope_frequencies, rope_reference
from dsv4.ops.norm.rms_norm import rms_norm_reference

INDEX_FORMATS = ("fp32", "bf16", "fp8", "fp4")


def query_prepare_reference(
    q: Tensor, positions: Tensor, frequencies: Tensor, eps: float
) -> Tensor:
    return rope_reference(rms_norm_reference(q, None, eps), positions, frequencies, inverse=False)


def index_query_reference(
    q: Tensor, positions: Tensor, frequencies: Tensor, index_format: str
) -> Tensor:
    return round_trip_index(rope_reference(q, positions, frequencies, inverse=False), index_format)


def _build(tokens: int, heads: int, dim: int, extra: Arguments, atol: float) -> Case:
    def make(generator: torch.Generator) -> Arguments:
        return {
            "q": torch.randn(tokens, heads, dim, generator=generator) * 3,
            "positions": torch.randint(0, 5000, (tokens,), generator=generator),
            "frequencies": rope_frequencies(16, 10000.0),
            **extra,
        }

    return Case(f"{tokens}x{heads}x{dim} {extra}", make, atol, atol)


def query_cases() -> Iterable[Case]:
    for shape in ((3, 4, 32), (1, 64, 512), (0, 2, 32), (9, 3, 48)):
        yield _build(*shape, {"eps": 1e-6}, 1e-5)


def index_cases() -> Iterable[Case]:
    for index_format in INDEX_FORMATS:
        yield _build(3, 4, 32, {"index_format": index_format}, 1e-2)
        yield _build(1, 64, 128, {"index_format": index_format}, 1e-2)


KERNELS = (Kernel("dsv4.ops.attention.query_triton"),)
ON_CPU = "dsv4.ops.cpu.attention"
PREPARE = Op("query_prepare", query_prepare_reference, query_cases, KERNELS, on_cpu=ON_CPU)
INDEX = Op("index_query", index_query_reference, index_cases, KERNELS, on_cpu=ON_CPU)


def _check(op: AnyOp, q: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    check_shape(op.name, "q", q, "tokens", "heads", "dim")
    check_rotation(op.name, "q", q, positions, frequencies)


def query_prepare(q: Tensor, positions: Tensor, frequencies: Tensor, eps: float) -> Tensor:
    """`[tokens, heads, dim]`, same shape and dtype."""
    _check(PREPARE, q, positions, frequencies)
    if q.numel() == 0:
        return torch.empty_like(q)
    return PREPARE(q.device, q=q, positions=positions, frequencies=frequencies, eps=eps)


def index_query(q: Tensor, positions: Tensor, frequencies: Tensor, index_format: str) -> Tensor:
    """`[tokens, index heads, index dim]`, same shape and dtype."""
    _check(INDEX, q, positions, frequencies)
    check(
        index_format in INDEX_FORMATS,
        INDEX.name,
        lambda: f"index_format is {index_format!r}, expected one of {', '.join(INDEX_FORMATS)}",
    )
    if q.numel() == 0:
        return torch.empty_like(q)
    return INDEX(
        q.device, q=q, positions=positions, frequencies=frequencies, index_format=index_format
    )


@dataclass(frozen=True)
class Queries:
    """`[tokens, heads, dim]`; as projected unless `is_prepared`. `eps` belongs to their norm."""

    q: Tensor
    eps: float
    is_prepared: bool = False

    @property
    def device(self) -> torch.device:
        return self.q.device
