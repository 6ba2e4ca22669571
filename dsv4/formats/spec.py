"""Sizes of the number formats, without torch: bytes of a [rows, cols] linear weight on disk.

A format stores `bits` per element and one scale per `tile` of (rows, cols); NVFP4 also has float32
scalars per matrix.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_NAN = 255
# The largest exponent spread an exact MXFP4 -> NVFP4 cast can hold: E4M3 has the powers of two
# from 2^-9 to 2^8.
NVFP4_EXACT_SPREAD = 17

NVFP4_GROUP = 16
MXFP4_GROUP = 32
FP8_BLOCK = 128

# Newest tokens in the state of a ratio-4 compressor. A block reads 8 of them; with 16, up to 9
# rejected drafts overwrite none that are still read.
CSA_ROWS = 16

# Precision of a product's input: unrounded, FP8 with a scale per 128 columns, NVFP4.
Activations = Literal["a16", "a8", "a4"]
WIDTHS: tuple[Activations, ...] = ("a16", "a8", "a4")  # finest first


@dataclass(frozen=True)
class Format:
    """How one kind of linear weight is stored."""

    name: str
    bits: int
    tile: tuple[int, int] | None = None  # (rows, cols) that share a scale
    scale_bytes: int = 0
    scalar_bytes: int = 0  # per matrix: globals
    lossless_from: tuple[str, ...] = ()

    def nbytes(self, rows: int, cols: int, count: int = 1) -> int:
        """Bytes of `count` matrices of [rows, cols]."""
        total = rows * cols * self.bits // 8 + self.scalar_bytes
        if self.tile is not None:
            total += ceil(rows / self.tile[0]) * ceil(cols / self.tile[1]) * self.scale_bytes
        return total * count


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("fp32", 32, lossless_from=("bf16", "fp16", "mxfp4", "fp8")),
        Format("bf16", 16, lossless_from=("mxfp4", "fp8")),
        Format("fp16", 16),
        Format("fp8", 8, (FP8_BLOCK, FP8_BLOCK), 1),  # E4M3 with E8M0 scales
        Format("fp8_f32", 8, (FP8_BLOCK, FP8_BLOCK), 4),  # E4M3 with float32 scales (Base)
        Format("mxfp4", 4, (1, MXFP4_GROUP), 1),
        # on disk: weight_scale_2 and input_scale
        Format("nvfp4", 4, (1, NVFP4_GROUP), 1, 8, lossless_from=("mxfp4",)),
    )
}
