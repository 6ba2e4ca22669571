"""Buffers that kernels keep between launches; one stream per device uses them."""

import logging

import torch

log = logging.getLogger(__name__)

_workspaces: dict[tuple[torch.device, str], torch.Tensor] = {}
_frozen: set[torch.device] = set()
_retired: list[torch.Tensor] = []  # too small by now, but captured graphs hold their addresses


def workspace(device: torch.device, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of at least `size`, zero when new, kept and grown.

    After a warm-up with the largest batch nothing is allocated any more. Where one has to grow
    all the same, graphs go on with the old one.
    """
    found = _workspaces.get((device, name))
    if found is None or found.numel() < size:
        if device in _frozen:
            most = 0 if found is None else found.numel()
            log.warning("workspace %s grows from %d to %d after the warm-up", name, most, size)
            if found is not None:
                _retired.append(found)
        found = torch.zeros(max(size, 1024), dtype=dtype, device=device)
        _workspaces[device, name] = found
    return found


def workspace_bytes(device: torch.device) -> int:
    return sum(held.nbytes for (where, _), held in _workspaces.items() if where == device)


def freeze_workspaces(device: torch.device, frozen: bool = True) -> None:
    """From now on (or no longer) graphs hold the addresses of workspaces."""
    (_frozen.add if frozen else _frozen.discard)(device)
