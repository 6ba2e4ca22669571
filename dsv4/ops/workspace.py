"""Buffers that kernels keep between launches; one stream per device uses them."""

import torch

from dsv4.errors import KernelError

_workspaces: dict[tuple[torch.device, str], torch.Tensor] = {}
_frozen: set[torch.device] = set()


def workspace(device: torch.device, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of at least `size`, zero when new, kept and grown.

    After a warm-up with the largest batch nothing is allocated any more, so graphs may be
    captured; they hold its address.
    """
    found = _workspaces.get((device, name))
    if found is None or found.numel() < size:
        if device in _frozen:
            most = 0 if found is None else found.numel()
            raise KernelError(
                f"workspace {name} would grow to {size} elements; the warm-up saw at most {most}"
            )
        found = torch.zeros(max(size, 1024), dtype=dtype, device=device)
        _workspaces[device, name] = found
    return found


def workspace_bytes(device: torch.device) -> int:
    return sum(held.nbytes for (where, _), held in _workspaces.items() if where == device)


def freeze_workspaces(device: torch.device, frozen: bool = True) -> None:
    """From now on (or no longer) a workspace that would have to grow is an error."""
    (_frozen.add if frozen else _frozen.discard)(device)
