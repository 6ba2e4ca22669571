"""Splits the last axis into groups; the last group may be short."""

import torch

from dsv4.errors import KernelError


def grouped_amax(x: torch.Tensor, group: int) -> torch.Tensor:
    """Largest magnitude of each group of the last axis: [..., C] -> [..., ceil(C / group)]."""
    return split(x.abs(), group).amax(dim=-1)


def split(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., C] -> [..., ceil(C / group), group], zero-padded."""
    short = -x.shape[-1] % group
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def expand(scale: torch.Tensor, group: int, channels: int) -> torch.Tensor:
    """Each group's value repeated over its channels: [..., G] -> [..., channels]."""
    return scale.repeat_interleave(group, dim=-1)[..., :channels]


def refuse_nonfinite(x: torch.Tensor, what: str) -> None:
    """Refuse NaN and Inf: 4 bits cannot encode them, and they would corrupt a group's scale."""
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        where = tuple((~finite).nonzero()[0].tolist())
        raise KernelError(
            f"{what}: found {float(x[where])} at {where}, expected finite values; "
            "fix the source, low-precision formats cannot hold it"
        )
