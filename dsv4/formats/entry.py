"""The parts of a cached entry, per storage format. No torch: `plan` uses the sizes too.

A key entry (window or compressed) stores its rotary channels separately; an index key does not.
"""

from dataclasses import dataclass

KV_GROUP = 64  # channels under one power-of-two scale (model spec, section 5, Q4)
INDEX_GROUP = 32  # the same for FP4 index keys (Q5)

_DTYPE_BYTES = {"float8_e4m3fn": 1, "uint8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Part:
    """A part of an entry: `width` contiguous numbers of one dtype."""

    name: str
    dtype: str
    width: int

    @property
    def nbytes(self) -> int:
        return self.width * _DTYPE_BYTES[self.dtype]


def kv_entry(kv_format: str, dim: int, rope_dim: int) -> tuple[Part, ...]:
    if kv_format == "fp8":
        nope_dim = dim - rope_dim
        num_groups = -(-nope_dim // KV_GROUP)
        return (
            Part("data", "float8_e4m3fn", nope_dim),
            Part("tail", "bfloat16", rope_dim),
            Part("scale", "uint8", -(-num_groups // 8) * 8),  # 7 scales and a padding byte for 448
        )
    return (Part("data", {"bf16": "bfloat16", "fp32": "float32"}[kv_format], dim),)


def index_entry(index_format: str, dim: int) -> tuple[Part, ...]:
    if index_format == "fp4":
        return (Part("data", "uint8", dim // 2), Part("scale", "uint8", -(-dim // INDEX_GROUP)))
    if index_format == "fp8":
        return (Part("data", "float8_e4m3fn", dim), Part("scale", "float32", 1))
    return (Part("data", {"bf16": "bfloat16", "fp32": "float32"}[index_format], dim),)


def entry_bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)
