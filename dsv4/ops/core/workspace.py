"""Buffers that an engine's kernels keep between launches, used by one stream per device."""

import logging

import torch

from dsv4.ops.core.context import current

log = logging.getLogger(__name__)


def workspace(device: torch.device, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A persistent buffer of at least `size`, zero when new, grown on demand.

    After a warm-up with the largest batch nothing more is allocated. If a buffer has to grow
    anyway, captured graphs keep using the old one.
    """
    engine = current().engine
    found = engine.buffers.get((device, name))
    if found is None or found.numel() < size:
        if device in engine.frozen:
            most = 0 if found is None else found.numel()
            log.warning("workspace %s grows from %d to %d after the warm-up", name, most, size)
            if found is not None:
                engine.outgrown.append(found)
        found = torch.zeros(max(size, 1024), dtype=dtype, device=device)
        engine.buffers[device, name] = found
    return found


def workspace_bytes(device: torch.device) -> int:
    return sum(
        held.nbytes for (where, _), held in current().engine.buffers.items() if where == device
    )


def freeze_workspaces(device: torch.device, frozen: bool = True) -> None:
    """Mark that graphs hold the addresses of workspaces from now on (or no longer)."""
    engine = current().engine
    (engine.frozen.add if frozen else engine.frozen.discard)(device)
