"""Describes a checkpoint from its headers. No torch; takes seconds even for a terabyte."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from dsv4.checkpoint import LAYOUTS
from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.manifest import Manifest, build_manifest
from dsv4.config import ModelConfig

_TITLES = {"swa": "window only", "csa": "ratio 4", "hca": "ratio 128"}


@dataclass
class Group:
    """Parameters with one role: their number formats and sizes."""

    name: str
    formats: dict[str, int] = field(default_factory=dict)  # label -> bytes
    num_tensors: int = 0
    num_parameters: int = 0
    nbytes: int = 0
    example: str = ""


@dataclass
class Draft:
    kind: str  # none, mtp, dspark
    num_blocks: int = 0
    num_tensors: int = 0
    nbytes: int = 0
    expert_dtype: str | None = None


@dataclass
class Summary:
    folder: str
    layout: str
    title: str
    names: str
    num_files: int
    num_tensors: int
    nbytes: int
    num_parameters: int
    kinds: list[str]
    groups: list[Group]
    draft: Draft
    ignored: dict[str, int]  # reason -> tensors
    quantization: dict[str, Any]
    findings: list[str]
    num_errors: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(folder: Path) -> Summary:
    """Read config.json and every header; problems are listed, not raised."""
    manifest = build_manifest(folder, ModelConfig.from_folder(folder), LAYOUTS.values())
    infos = manifest.scan.tensors.values()
    findings = [*manifest.findings, *manifest.scan.draft_findings]
    groups = _groups(manifest)
    layout = manifest.layout
    return Summary(
        folder=str(folder),
        layout=layout.name if layout else "unknown",
        title=layout.title if layout else "no known layout",
        names=" and ".join(manifest.families) or "unknown",
        num_files=len(manifest.scan.files),
        num_tensors=len(manifest.scan.tensors),
        nbytes=sum(info.nbytes for info in infos),
        num_parameters=sum(group.num_parameters for group in groups),
        kinds=list(_kinds(manifest.config)),
        groups=groups,
        draft=_draft(manifest),
        ignored=dict(Counter(manifest.ignored.values())),
        quantization=manifest.scan.quantization,
        findings=[item.line() for item in findings],
        num_errors=sum(item.level == "error" for item in findings),
    )


def _groups(manifest: Manifest) -> list[Group]:
    groups: dict[str, Group] = {}
    formats: dict[str, Counter[str]] = defaultdict(Counter)
    for source in manifest.sources.values():
        parameter = source.parameter
        group = groups.setdefault(parameter.group, Group(parameter.group))
        count = 1
        for size in parameter.shape:
            count *= size
        group.num_parameters += count
        group.num_tensors += len({i.name for cell in source.matrices for i in cell.stored.tensors})
        group.nbytes += source.nbytes
        formats[parameter.group][source.stored.label] += source.nbytes
        if not group.example or parameter.kind == "linear":
            group.example = f"{source.name} {list(parameter.shape)}"
    for name, group in groups.items():
        group.formats = dict(formats[name].most_common())
    return sorted(groups.values(), key=lambda group: -group.nbytes)


def _kinds(config: ModelConfig) -> Iterator[str]:
    """Runs of equal or alternating layers, as in "2-42: ratio 4 / ratio 128"."""
    hashed = config.num_hash_layers
    for is_hashed, run in groupby(enumerate(config.kinds), key=lambda item: item[0] < hashed):
        layers = list(run)
        kinds = list(dict.fromkeys(_TITLES[kind] for _, kind in layers))
        counts = Counter(_TITLES[kind] for _, kind in layers)
        first, last = layers[0][0], layers[-1][0]
        span = f"{first}" if first == last else f"{first}-{last}"
        words = ", ".join(f"{counts[kind]} x {kind}" for kind in kinds)
        yield f"layers {span}: {words}; {'routed by token id' if is_hashed else 'scored router'}"


def _draft(manifest: Manifest) -> Draft:
    found: dict[str, TensorInfo] = {
        name.removeprefix("model."): info
        for name, info in manifest.scan.tensors.items()
        if name.startswith(("mtp.", "model.mtp."))
    }
    if not found:
        return Draft("none")
    kind = "dspark" if any(".markov_head." in name for name in found) else "mtp"
    blocks = {name.split(".")[1] for name in found}
    expert = next((i for n, i in found.items() if n.endswith(".experts.0.w1.weight")), None)
    return Draft(
        kind=kind,
        num_blocks=len(blocks),
        num_tensors=len(found),
        nbytes=sum(info.nbytes for info in found.values()),
        expert_dtype=expert.dtype if expert else None,
    )
