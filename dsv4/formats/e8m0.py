"""E8M0: one byte b meaning 2^(b-127); 255 is NaN; there is no sign and no zero."""

import struct

import torch

from dsv4.formats.spec import E8M0_BIAS

NAN = 255
_MANTISSA = 0x7FFFFF


def decode(byte: torch.Tensor) -> torch.Tensor:
    """Bytes (uint8, or an E8M0 tensor reinterpreted by the caller) as float32 powers of two."""
    bits = byte.to(torch.int32) << 23
    # the shift alone gives 0 for 2^-127, which is a float32 subnormal, and Inf for NaN
    bits = torch.where(byte == 0, 0x00400000, bits)
    return torch.where(byte == NAN, 0x7FC00000, bits).view(torch.float32)


def ceil_exponent(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest k with amax <= limit * 2^k, as int32; exact, from the bits of a float32.

    `amax` is positive and normal; `limit` is the largest number of the element format.
    """
    bits = amax.view(torch.int32)
    limit_bits: int = struct.unpack("<i", struct.pack("<f", limit))[0]
    exponent = (bits >> 23) - (limit_bits >> 23)
    return exponent + ((bits & _MANTISSA) > (limit_bits & _MANTISSA)).to(torch.int32)


def from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """Bytes of the powers 2^exponent; exponents are clamped to -127..127."""
    return (exponent + E8M0_BIAS).clamp(0, 254).to(torch.uint8)
