"""Error measures and their limits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.tools.doctor.plain.layer import Formats


@dataclass(frozen=True)
class Limits:
    """Largest allowed error of a single row, and of the mean over rows."""

    worst: float
    mean: float


# Relative to a row's norm. A single row may be further off than the average: one number that
# rounds the other way moves a whole group of its row.
_FP32 = Limits(3e-4, 1e-4)
_BF16 = Limits(4e-2, 8e-3)
_WIDE_OF_BF16 = Limits(1e-2, 4e-3)  # fp32 results of bf16 inputs and weights
_STORED = {"fp32": _FP32, "bf16": Limits(2e-2, 5e-3), "fp8": Limits(8e-2, 1e-2)}
_INDEX = {**_STORED, "fp4": Limits(3e-1, 3e-2)}
_EXACT = Limits(0.0, 0.0)
_ROUNDED = _STORED["fp8"]  # an expert's activation may round the other way
_PRODUCTS = ("latent_raw", "kv_raw", "q_raw", "low", "attn_y", "ffn_y")
_LOSSY = Limits(6e-1, 3e-1)  # weights in another format; a misread one is off by more than itself
_ALWAYS_FP32 = (
    "post", "comb", "values", "gates", "head_weights", "scores", "expert_weights", "logits", "tail",
)  # fmt: skip


def limits(tap: str, formats: Formats) -> Limits:
    if tap in ("selected", "experts"):
        return _EXACT
    if formats.lossy:
        return _LOSSY
    if tap in ("key", "entries"):
        rough = _STORED[formats.kv]
    elif tap in ("index_keys", "index_q"):
        rough = _INDEX[formats.index]
    else:
        rough = _ROUNDED if formats.widths and tap in _PRODUCTS else _FP32
    if formats.dtype == torch.float32:
        return rough
    if tap.endswith(_ALWAYS_FP32):
        return _WIDE_OF_BF16
    return Limits(max(rough.worst, _BF16.worst), max(rough.mean, _BF16.mean))


@dataclass(frozen=True)
class Error:
    """Relative errors of one tap: the worst row's and the mean; and the overall cosine."""

    worst: float = 0.0
    mean: float = 0.0
    cosine: float = 1.0
    row: int = 0

    def within(self, limit: Limits) -> bool:
        return self.worst <= limit.worst and self.mean <= limit.mean

    def ratio(self, limit: Limits) -> float:
        """Error over limit: 1 is the limit; exact taps go from 0 straight past it."""
        if limit.worst == 0:
            return 0.0 if self.worst == 0 else float("inf")
        return max(self.worst / limit.worst, self.mean / limit.mean)


def difference(found: Tensor, expected: Tensor) -> Error:
    if found.shape != expected.shape:
        return Error(float("inf"), float("inf"), 0.0)
    if found.numel() == 0:
        return Error()
    if not found.is_floating_point():
        rows = (found != expected).flatten(1).any(1).double()
        return Error(float(rows.max()), float(rows.mean()), 1.0, int(rows.argmax()))
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    size = (expected * expected).sum(1).sqrt()
    length = float((size * size).sum().sqrt())
    # a row that nearly cancels out must not be judged by its own tiny norm
    floor = 0.1 * length / size.shape[0] ** 0.5 + 1e-30
    off = found - expected
    rows = (off * off).sum(1).sqrt() / size.clamp(min=floor)
    rows = torch.nan_to_num(rows, nan=float("inf"))
    worst, row = rows.max(0)
    lengths = length * float((found * found).sum().sqrt())
    cosine = float((found * expected).sum()) / lengths if lengths > 0 else 1.0
    return Error(float(worst), float(rows.mean()), cosine, int(row))
