"""A wrong op call saved in a folder: safetensors and JSON, nothing executable, replayable anywhere.

    tensors.safetensors   the arguments' tensors, the op's results, found and expected values
    capsule.json          where it happened, versions, and how the tensors form the arguments

Pages, slots, experts and vocabulary rows that the call does not use are omitted.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4 import __version__
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, UnpackedTensor
from dsv4.ops import OPS
from dsv4.ops.attention.attention import Compressed, Visible
from dsv4.ops.attention.index import IndexEntries
from dsv4.ops.core.arguments import copied, leaves
from dsv4.ops.core.op import AnyOp, Arguments
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.gemm.weights.tiled import TiledMxfp4, TiledNvfp4
from dsv4.ops.kv.compress import Compression, CompressorState
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.kv.pool import PagedPool, unpack
from dsv4.ops.mhc.mix import MixSite, Update
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.router import Gate
from dsv4.tools.doctor.check import Evidence
from dsv4.tools.doctor.compare import difference

VERSION = 3  # 2: typed arguments; 3: of mHC and of index scores, too
_FACTS, _TENSORS = "capsule.json", "tensors.safetensors"
# the only types a capsule may contain besides tensors, numbers, strings and lists
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Ragged, PagedPool, CompressorState, Compressed, MixSite, Update, WindowKey, Compression,
        Visible, IndexEntries, Gate, Experts,
        Nvfp4Tensor, Mxfp4Tensor, Fp8BlockTensor, UnpackedTensor, TiledNvfp4, TiledMxfp4,
        ScaledTensor, A8Fp8, A8Mxfp4,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """A capsule replayed on this machine. Errors are relative to a row's norm."""

    op: str
    station: str
    layer: int
    position: int
    cause: str
    versions: dict[str, str]
    limit: float
    found_error: float  # of the original run, against the plain model
    reference_error: float  # of the original run, against the reference run here
    kernel_error: float | None  # of a kernel run here, against the reference; None on a CPU

    @property
    def title(self) -> str:
        return self.op if self.op == self.station else f"{self.op} ({self.station})"

    @property
    def is_kernel(self) -> bool:
        return self.reference_error > self.limit

    @property
    def is_fixed(self) -> bool:
        """Only a kernel fault can turn out fixed: wrong arguments stay wrong."""
        ran_here = self.kernel_error is not None and self.kernel_error <= self.limit
        return self.is_kernel and ran_here

    @property
    def verdict(self) -> str:
        if self.is_fixed:
            return "the kernel that was wrong is right here"
        if self.kernel_error is not None and self.kernel_error > self.limit:
            return "the kernel is wrong here too"
        if self.is_kernel:
            return "what ran then differs from the reference on the same arguments: the kernel"
        return "the op did what it was asked: its arguments, weights or state were wrong"


def save_capsule(folder: Path, evidence: Evidence, config: ModelConfig, settings: str) -> None:
    cell, call = evidence.cell, evidence.call
    tensors: dict[str, Tensor] = {}
    arguments = reduced(call.before)
    tree = {name: _encode(value, f"arguments.{name}", tensors) for name, value in arguments.items()}
    tensors |= {
        f"gave.{path}": value
        for path, value in outputs(call.op, call.result, reduced(call.after)).items()
    }
    for label, taps in (("found", evidence.found), ("expected", evidence.expected)):
        tensors |= {f"{label}.{name}": taps[name] for name in evidence.found}
    facts = {
        "version": VERSION,
        "op": call.op.name,
        "station": cell.station,
        "layer": cell.layer,
        "step": cell.step,
        "position": cell.position,
        "limit": cell.limit.worst,
        "cause": cell.cause.text if cell.cause else "",
        "versions": {"dsv4": __version__, "torch": torch.__version__},
        "settings": settings,
        "config": asdict(config),
        "arguments": tree,
    }
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(own, folder / _TENSORS)
    (folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def replay(folder: Path, device: str = "cpu") -> Replay:
    facts, tensors = _read(folder)
    op = OPS[facts["op"]]
    try:
        stored = {name: _decode(tree, tensors) for name, tree in facts["arguments"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise OptionError(f"{folder}: the arguments do not fit together ({error!r})") from error
    mine = copied(stored)
    wanted = outputs(op, op.reference(**mine), mine)
    gave = _under("gave.", tensors)
    return Replay(
        op.name,
        facts["station"],
        facts["layer"],
        facts["position"],
        facts["cause"],
        facts["versions"],
        facts["limit"],
        _apart(_under("found.", tensors), _under("expected.", tensors)),
        _apart(gave, wanted),
        _kernel_error(op, stored, wanted, device),
    )


def _kernel_error(
    op: AnyOp, stored: Arguments, wanted: dict[str, Tensor], device: str
) -> float | None:
    if device == "cpu":
        return None
    there = copied(stored, lambda tensor: tensor.to(device))
    for kernel in op.kernels:
        if kernel.supports(there) is None:
            result = kernel.run(there)
            return _apart(copied(outputs(op, result, there), torch.Tensor.cpu), wanted)
    return None


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (_FACTS, _TENSORS):
        if not (folder / name).is_file():
            raise OptionError(f"{folder} has no {name}; expected a folder written by --save")
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (ValueError, OSError, SafetensorError) as error:
        raise OptionError(
            f"{folder} is no capsule ({error}); write it again with --save"
        ) from error
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise OptionError(f"{folder}/{_FACTS} is not of version {VERSION}; write it again")
    if facts.get("op") not in OPS:
        raise OptionError(f"the capsule is of op {facts.get('op')!r}, which this version has not")
    return facts, tensors


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error; values that are NaN on both sides (unwritten) agree."""
    worst = 0.0
    for name, value in expected.items():
        other = found[name]
        if value.is_floating_point() and other.shape == value.shape:
            both = value.isnan() & other.isnan()
            value, other = value.masked_fill(both, 0), other.masked_fill(both, 0)
        rows = (1, -1) if value.dim() < 2 else value.shape
        worst = max(worst, difference(other.reshape(rows), value.reshape(rows)).worst)
    return worst


def outputs(op: AnyOp, result: Any, arguments: Arguments) -> dict[str, Tensor]:
    """A call's results and in-place writes as numbers; pages are unpacked."""
    written = {}
    for name, value in op.written(arguments).items():
        is_pool = isinstance(value, PagedPool)
        written[name] = unpack(value, value.parts).flatten(0, 1) if is_pool else value
    return dict(leaves({"result": result, **written}))


# --- omitting what a call does not use ------------------------------------------------------------


def reduced(arguments: Arguments) -> Arguments:
    small = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, WindowKey | Compression | Visible | IndexEntries):
            own = {item.name: getattr(value, item.name) for item in fields(value)}
            small[name] = replace(value, **reduced(own))
    if "pool" in small:
        small["pool"], small["table"] = _pages(small["pool"], small["table"])
    if small.get("compressed") is not None:
        seen = small["compressed"]
        pool, table = _pages(seen.pool, seen.table)
        small["compressed"] = replace(seen, pool=pool, table=table)
    if "state" in small:
        slots, places = torch.unique(small["batch"].slots, return_inverse=True)
        small["state"] = copied(small["state"], lambda tensor: tensor[slots])
        small["batch"] = replace(small["batch"], slots=places)
    if isinstance(small.get("by"), Experts):
        used, small["experts"] = torch.unique(small["experts"], return_inverse=True)
        by = small["by"]
        w13, w2 = (copied(weight, lambda tensor: tensor[used]) for weight in (by.w13, by.w2))
        small["by"] = replace(by, w13=w13, w2=w2)
    if "num_streams" in small:
        used, small["token_ids"] = torch.unique(small["token_ids"], return_inverse=True)
        small["table"] = small["table"][used]
    return small


def _pages(pool: PagedPool, table: Tensor) -> tuple[PagedPool, Tensor]:
    used, places = torch.unique(table, return_inverse=True)
    parts = {}
    for name, part in pool.parts.items():
        rows = part.view(torch.uint8)[used.long()]  # not every dtype can be indexed
        parts[name] = rows.view(part.dtype)
    return replace(pool, parts=parts), places.to(table.dtype)


# --- arguments as JSON and tensors ----------------------------------------------------------------


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {"list": [_encode(part, f"{path}.{i}", tensors) for i, part in enumerate(value)]}
    if isinstance(value, dict):
        parts = value.items()
        return {"dict": {name: _encode(part, f"{path}.{name}", tensors) for name, part in parts}}
    assert is_dataclass(value), type(value)
    assert type(value).__name__ in _TYPES, f"{type(value).__name__} must be listed in _TYPES"
    named = {item.name: getattr(value, item.name) for item in fields(value)}
    return {
        "type": type(value).__name__,
        "fields": {name: _encode(part, f"{path}.{name}", tensors) for name, part in named.items()},
    }


def _decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    readers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda path: tensors[path],
        "value": lambda value: value,
        "dtype": lambda name: {str(d): d for d in _DTYPES}[f"torch.{name}"],
        "list": lambda parts: [_decode(part, tensors) for part in parts],
        "dict": lambda parts: {name: _decode(part, tensors) for name, part in parts.items()},
        "type": lambda name: _TYPES[name](
            **{key: _decode(part, tensors) for key, part in tree["fields"].items()}
        ),
    }
    kind = next(name for name in readers if name in tree)
    return readers[kind](tree[kind])


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
