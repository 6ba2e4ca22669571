"""E2M1: 4 bits, values 0 0.5 1 1.5 2 3 4 6 and their negatives; two per byte, low nibble first.

Rounds to nearest, ties to the even code, saturating at 6. Code 8 is minus zero and legal.
"""

import torch

from dsv4.errors import KernelError

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLE = (*VALUES, *(-value for value in VALUES))


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of finite float32 values."""
    magnitude = x.abs()
    # A tie between codes c and c+1 goes to the even one: strict comparison above even codes only.
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code + torch.signbit(x).to(torch.uint8) * 8


def decode(code: torch.Tensor) -> torch.Tensor:
    """float32 values of codes 0..15."""
    table = torch.tensor(_TABLE, dtype=torch.float32, device=code.device)
    return table[code.to(torch.int32)]


def round_to(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 values as float32, without encoding."""
    magnitude = x.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # torch.round sends ties to even multiples of the step, which are the even codes
    return torch.copysign(torch.round(magnitude / step) * step, x)


def pack(code: torch.Tensor) -> torch.Tensor:
    """[..., K] codes -> [..., K/2] bytes."""
    if code.shape[-1] % 2:
        raise KernelError(
            f"packing E2M1 needs an even last axis, found {code.shape[-1]}; pad the columns"
        )
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes -> [..., K] codes. The bytes are unsigned: a signed shift would extend."""
    if packed.dtype != torch.uint8:
        raise KernelError(f"packed E2M1 is {packed.dtype}, expected uint8; view it as uint8 first")
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes -> [..., K] float32, one table lookup per byte."""
    if packed.dtype != torch.uint8:
        raise KernelError(f"packed E2M1 is {packed.dtype}, expected uint8; view it as uint8 first")
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode(unpack(byte[:, None]))  # [256, 2]
    return pairs[packed.to(torch.int32)].flatten(-2)
