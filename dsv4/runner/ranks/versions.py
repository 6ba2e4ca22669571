"""What all ranks must share besides the checkpoint: code, libraries, and the type of their GPUs.

Ranks have the same bits only with the same kernels, which differ between types of GPUs and are
compiled by Triton.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from dsv4 import __version__

PACKAGE = Path(__file__).parents[2]


def versions(device: str) -> dict[str, str]:
    """Of this process and its device, by name."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {
        "dsv4": f"{__version__} ({code_digest(PACKAGE)})",
        "torch": str(torch.__version__),
        "Triton": triton,
        "device": "CPU" if device == "cpu" else torch.cuda.get_device_name(device),
    }


@cache
def code_digest(package: Path) -> str:
    """Two commits may have one version."""
    found = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        found.update(path.relative_to(package).as_posix().encode() + b"\0")
        found.update(path.read_bytes())
    return found.hexdigest()


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """ "torch 2.11.0, expected 2.12.0", or nothing."""
    return "; ".join(
        f"{name} {found.get(name)}, expected {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    )
