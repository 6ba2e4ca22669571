"""Which tensors on disk fill which parameter: every parameter once, every tensor accounted for.

Built only from headers and config (no torch), so the loader, `inspect` and `check` share it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.checkpoint import names
from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.files.index import Scan, scan_folder
from dsv4.checkpoint.findings import Finding, collapse
from dsv4.checkpoint.layouts import Facts, Layout, block_size, refusal
from dsv4.checkpoint.sources import Source, SourceMatrix
from dsv4.checkpoint.stacked import Modules, part_names, unstack
from dsv4.checkpoint.stored_matrix import ACTIVATION_SUFFIXES, PLAIN_DTYPES, StoredMatrix, detect
from dsv4.config import ModelConfig

ACTIVATION = "activation scale; activations are scaled as they come"
DRAFT = "draft block; the backbone does not use it"
BACKBONE = "backbone; the draft blocks do not use it"
COPIES = (".emb.tok_emb.weight", ".0.head.weight")  # in draft blocks: embedding and head


@dataclass
class Manifest:
    folder: Path
    config: ModelConfig
    scan: Scan
    families: list[names.Family] = field(default_factory=list)
    layout: Layout | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)  # tensor on disk -> why
    findings: list[Finding] = field(default_factory=list)
    is_draft: bool = False  # draft blocks, not the backbone

    @property
    def family(self) -> names.Family | None:
        return self.families[0] if len(self.families) == 1 else None

    def labels(self, group: str) -> list[str]:
        """Number formats found in a group of parameters."""
        found = {s.stored.label for s in self.sources.values() if s.parameter.group == group}
        return sorted(found)


def build_manifest(
    folder: Path, config: ModelConfig, layouts: Iterable[Layout], *, is_draft: bool = False
) -> Manifest:
    """Match the folder's tensors with the parameters of `config`; problems become findings.
    `is_draft`: the draft blocks' parameters instead of the backbone's."""
    scan = scan_folder(folder)
    manifest = Manifest(folder, config, scan, findings=list(scan.findings), is_draft=is_draft)
    manifest.findings += scan.draft_findings if is_draft else []
    found = list(scan.tensors)
    manifest.families = names.families_in(found)
    if not _one_family(manifest, found):
        return manifest
    modules, leaves, unknown = _place(manifest)
    refused = refusal(scan.quantization, found)
    if refused is not None:
        manifest.findings.append(refused)
        return manifest
    used = _fill(manifest, modules, leaves)
    spare = [info for key, group in modules.items() if key not in used for info in group.values()]
    spare += [info for name, info in leaves.items() if (name, None) not in used]
    what = "is no parameter of this model"
    manifest.findings += [_finding("unexpected", what, info) for info in unknown + spare]
    facts = Facts.of(manifest.family or "official", scan, manifest.sources.values())
    manifest.layout = next((item for item in layouts if item.matches(facts)), None)
    if manifest.layout is not None and not is_draft:
        manifest.findings += manifest.layout.cross_check(facts)
    manifest.findings = collapse(manifest.findings)
    return manifest


def _one_family(manifest: Manifest, found: list[str]) -> bool:
    if len(manifest.families) > 1:
        both = " and ".join(manifest.families)
        manifest.findings.append(
            Finding(
                "error",
                "names",
                f"tensors under {both} names in one folder, expected one family",
                cause="files of two checkpoints lie in one folder",
            )
        )
        return False
    if not manifest.families and not any(f.level == "error" for f in manifest.findings):
        shown = ", ".join(sorted(found)[:10]) or "none"
        manifest.findings.append(
            Finding(
                "error",
                "names",
                "no DeepSeek-V4 tensor names, expected layers.0.attn..., model.layers.0.attn... "
                f"or model.layers.0.self_attn...; found {shown}",
            )
        )
    return bool(manifest.families)


def _place(manifest: Manifest) -> tuple[Modules, dict[str, TensorInfo], list[TensorInfo]]:
    """Sort every tensor under its official module; draft tensors are kept apart."""
    modules: Modules = defaultdict(dict)
    leaves: dict[str, TensorInfo] = {}
    unknown: list[TensorInfo] = []
    assert manifest.family is not None
    for name, info in manifest.scan.tensors.items():
        if names.is_draft(name) != manifest.is_draft:
            manifest.ignored[name] = BACKBONE if manifest.is_draft else DRAFT
            continue
        if manifest.is_draft:
            name = name.removeprefix("model.")  # official names inside, in every family
            if name.endswith(COPIES):
                manifest.ignored[info.name] = "a copy of the model's own"
                continue
        family = "official" if manifest.is_draft else manifest.family
        place = names.locate(name, family)
        if place is None:
            unknown.append(info)
        elif not place.suffix:
            leaves[place.module] = info
        elif place.suffix in modules[place.module, place.expert]:
            other = modules[place.module, place.expert][place.suffix]
            message = f"fills the same parameter as {other.name}, expected one of them"
            manifest.findings.append(_finding("duplicate", message, info))
        else:
            modules[place.module, place.expert][place.suffix] = info
    return modules, leaves, unknown


def _fill(
    manifest: Manifest, modules: Modules, leaves: dict[str, TensorInfo]
) -> set[tuple[str, int | None]]:
    """Make a Source for each parameter; returns the modules and leaves that were used."""
    used: set[tuple[str, int | None]] = set()
    missing: list[str] = []
    block = block_size(manifest.scan.quantization)
    config = manifest.config
    wanted_all = names.draft_parameters(config) if manifest.is_draft else names.parameters(config)
    unused, problems = unstack(modules, wanted_all, block)
    manifest.findings += problems
    manifest.ignored |= {info.name: ACTIVATION for info in unused}
    for name, parameter in wanted_all.items():
        if name in leaves and parameter.kind != "table":
            used.add((name, None))
            stored = _leaf(leaves[name], parameter)
            _add(manifest, name, parameter, [(stored, None, 0)])
            continue
        if parameter.kind == "table" and name in leaves:
            used.add((name, None))
            _add(manifest, name, parameter, [(_table(leaves[name], parameter), None, 0)])
            continue
        wanted = _wanted(name, parameter)
        matrices: list[tuple[StoredMatrix | Finding, int | None, int]] = []
        for module, expert, part, shape in wanted:
            found = modules.get((module, expert))
            if found is None:
                missing += [] if parameter.is_optional else [_spell(module, expert, name)]
                continue
            used.add((module, expert))
            stored_or = detect(found, shape, block, may_quantize=parameter.kind == "linear")
            for suffix in ACTIVATION_SUFFIXES:
                if suffix in found:
                    manifest.ignored[found[suffix].name] = ACTIVATION
            matrices.append((stored_or, expert, part))
        if len(matrices) == len(wanted):
            _add(manifest, name, parameter, matrices)
        else:
            _collect(manifest, matrices)
    what = "is missing; the model needs it, fetch the checkpoint again"
    unread = manifest.scan.unread or (manifest.is_draft and manifest.scan.draft_findings)
    if not unread:  # otherwise it may be in the unreadable file
        manifest.findings += [Finding("error", "missing", what, name) for name in missing]
    return used


def _wanted(
    name: str, parameter: names.Parameter
) -> list[tuple[str, int | None, int, tuple[int, ...]]]:
    """(module, expert, part, shape) of each matrix of a parameter."""
    if name.endswith((".w13", ".w2")):
        *lead, rows, cols = parameter.shape
        parts = part_names(name)
        experts: list[int | None] = list(range(lead[0])) if lead else [None]
        shape = (rows // len(parts), cols)
        return [
            (module, expert, part, shape) for expert in experts for part, module in enumerate(parts)
        ]
    module = name.removesuffix(".weight")
    return [(module, None, 0, parameter.shape)]


def _spell(module: str, expert: int | None, name: str) -> str:
    """The official spelling of a missing matrix, for the message."""
    if expert is not None:
        prefix, _, leaf = module.rpartition(".")
        return f"{prefix}.{expert}.{leaf}.weight"
    return f"{module}.weight" if name.endswith((".weight", ".w13", ".w2")) else module


def _leaf(info: TensorInfo, parameter: names.Parameter) -> StoredMatrix | Finding:
    if info.dtype not in PLAIN_DTYPES:
        return _finding("dtype", f"dtype {info.dtype}, expected {', '.join(PLAIN_DTYPES)}", info)
    return _shaped(info, parameter)


def _table(info: TensorInfo, parameter: names.Parameter) -> StoredMatrix | Finding:
    if info.dtype not in ("I64", "I32"):
        return _finding("dtype", f"dtype {info.dtype}, expected I64 expert ids", info)
    return _shaped(info, parameter)


def _shaped(info: TensorInfo, parameter: names.Parameter) -> StoredMatrix | Finding:
    if info.shape == parameter.shape:
        return StoredMatrix("plain", info)
    message = f"shape {list(info.shape)}, expected {list(parameter.shape)}"
    return _finding("shape", message, info)


def _add(
    manifest: Manifest,
    name: str,
    parameter: names.Parameter,
    matrices: list[tuple[StoredMatrix | Finding, int | None, int]],
) -> None:
    good = _collect(manifest, matrices)
    if len(good) < len(matrices):
        return
    first = good[0].stored
    for matrix in good:
        if _kind(matrix.stored) != _kind(first):
            message = (
                f"stored as {_kind(matrix.stored)}, but {first.data.name} of the same layer as "
                f"{_kind(first)}; expected one format for all experts of a layer"
            )
            manifest.findings.append(_finding("format", message, matrix.stored.data))
            return
    manifest.sources[name] = Source(name, parameter, tuple(good))


def _collect(
    manifest: Manifest, matrices: list[tuple[StoredMatrix | Finding, int | None, int]]
) -> list[SourceMatrix]:
    good = []
    for stored, expert, part in matrices:
        if isinstance(stored, Finding):
            manifest.findings.append(stored)
        else:
            good.append(SourceMatrix(stored, expert, part))
    return good


def _kind(stored: StoredMatrix) -> str:
    scale = stored.scale.dtype if stored.scale else "no"
    return f"{stored.format} {stored.data.dtype} with {scale} scales"


def _finding(check: str, message: str, info: TensorInfo) -> Finding:
    return Finding("error", check, message, info.name, info.file.name)
