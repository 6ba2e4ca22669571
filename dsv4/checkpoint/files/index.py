"""The files of a checkpoint folder and all tensors in them, from the headers alone. No torch.

With `model.safetensors.index.json`, index and headers must agree; without one,
`model.safetensors` or all `*.safetensors` are read. A shard must be in the folder itself. Other
safetensors files, which hold no tensor of a model, are listed and ignored. A lost or broken shard
to which the index gives nothing but draft tensors concerns draft blocks alone.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.checkpoint.files.header import TensorInfo, read_header
from dsv4.checkpoint.findings import Finding
from dsv4.checkpoint.names import is_draft, is_ours
from dsv4.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 200_000_000
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_FOREIGN = ("*.gguf", "*.bin", "*.pt", "*.pth")


@dataclass
class Scan:
    """Everything read from the headers of a folder."""

    folder: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # files that are missing or broken
    findings: list[Finding] = field(default_factory=list)
    draft_findings: list[Finding] = field(default_factory=list)  # errors that answers do not need
    quantization: dict[str, Any] = field(default_factory=dict)  # from config.json
    config: dict[str, Any] = field(default_factory=dict)

    def error(self, check: str, message: str, **where: str | None) -> None:
        self.findings.append(Finding("error", check, message, **where))


def scan_folder(folder: Path) -> Scan:
    """Read every header; problems become findings, so all of them can be listed."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; expected one with config.json and safetensors files"
        )
    scan = Scan(folder)
    scan.config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    quantization = scan.config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        scan.error(
            "config",
            f"quantization_config is a {type(quantization).__name__}, expected an object",
            file="config.json",
        )
    scan.quantization = quantization if isinstance(quantization, dict) else {}
    index = folder / INDEX_NAME
    weight_map = _read_index(scan, index) if index.is_file() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else _shards(scan)
    others = {file for name, file in (weight_map or {}).items() if not is_draft(name)}
    for name in names:
        _read_shard(scan, name, only_drafts=weight_map is not None and name not in others)
    if weight_map is not None:
        _compare_index(scan, weight_map)
    return scan


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from the checkpoint folder, refused if damaged or oversized."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: found {size} bytes, expected at most {MAX_JSON_BYTES} for a JSON file"
            )
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: found a {type(data).__name__}, expected a JSON object")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in found if names.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _read_index(scan: Scan, path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map; expected tensor names and their files")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path}: tensor {name!r} has file {file!r}, expected a name")
    return weight_map


def _shards(scan: Scan) -> list[str]:
    """The files to read when there is no index; numbered ones must be complete."""
    found = sorted(path.name for path in scan.folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        for name in found:
            if name != "model.safetensors" and not _left_alone(scan, name):
                scan.error(
                    "files",
                    "has tensors of a model beside model.safetensors, and no index says which is "
                    "meant; keep one checkpoint in the folder",
                    file=name,
                )
        return ["model.safetensors"]
    if any(not _is_foreign(scan, name) for name in found):
        found = [name for name in found if not _left_alone(scan, name)]
    if not found:
        foreign = [p.name for pattern in _FOREIGN for p in scan.folder.glob(pattern)]
        hint = f"; {foreign[0]} is not read, only safetensors are" if foreign else ""
        raise CheckpointError(f"{scan.folder} has no safetensors files{hint}")
    for name in found:
        match = _NUMBERED.fullmatch(name)
        if match:
            stem, count = match[1], int(match[3])
            for number in range(1, min(count, 10_000) + 1):
                shard = f"{stem}-{number:05d}-of-{match[3]}.safetensors"
                if shard not in found:
                    scan.unread.append(shard)
                    scan.error("files", f"missing; {name} says there are {count} files", file=shard)
            break
    return found


def _is_foreign(scan: Scan, name: str) -> bool:
    """Whether a file is not part of the checkpoint: no tensor in it has a model's name."""
    if _outside(scan.folder, name):
        return False
    try:
        return not any(is_ours(tensor) for tensor in read_header(scan.folder / name))
    except CheckpointError:
        return False  # perhaps a damaged part of the checkpoint


def _left_alone(scan: Scan, name: str) -> bool:
    """`_is_foreign`, reported in the findings."""
    foreign = _is_foreign(scan, name)
    if foreign:
        message = "has no tensor of a model; left alone"
        scan.findings.append(Finding("note", "files", message, file=name))
    return foreign


def _read_shard(scan: Scan, name: str, *, only_drafts: bool) -> None:
    path = scan.folder / name
    problem = _outside(scan.folder, name)
    if problem:
        scan.error("files", problem, file=name)
        scan.unread.append(name)
        return
    finding = None
    if not path.is_file():
        message = f"named by {INDEX_NAME} but missing; fetch it"
        finding = Finding("error", "files", message, file=name)
    else:
        try:
            tensors = read_header(path)
        except CheckpointError as error:
            message = str(error).removeprefix(f"{path}: ")
            finding = Finding("error", "header", message, file=name)
    if finding is not None:
        (scan.draft_findings if only_drafts else scan.findings).append(finding)
        scan.unread += [] if only_drafts else [name]
        return
    scan.files.append(path)
    for info in tensors.values():
        other = scan.tensors.get(info.name)
        if other is not None:
            scan.error(
                "duplicate",
                f"also in {other.file.name}; expected once",
                tensor=info.name,
                file=name,
            )
        scan.tensors[info.name] = info


def _outside(folder: Path, name: str) -> str | None:
    """Why this shard name is refused: it would leave the folder."""
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        return f"{name!r} is not a plain file name in the folder; refused"
    real = (folder / name).resolve()
    root = folder.resolve()
    if real.parent == root:
        return None
    # The hub's cache keeps snapshots/<revision>/<file> as links into the same model's blobs/.
    if root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs":
        return None
    return f"is a link to {real}, outside the folder; refused, copy the file itself"


def _compare_index(scan: Scan, weight_map: dict[str, str]) -> None:
    read, named = {path.name for path in scan.files}, set(weight_map.values())
    for name, file in weight_map.items():
        info = scan.tensors.get(name)
        if file in read and (info is None or info.file.name != file):
            found = f"it is in {info.file.name}" if info else "it is nowhere"
            scan.error("index", f"{INDEX_NAME} says it is here; {found}", tensor=name, file=file)
    for name, info in scan.tensors.items():
        if name not in weight_map:
            scan.error(
                "index", f"is in the file but not in {INDEX_NAME}", tensor=name, file=info.file.name
            )
    for path in sorted(scan.folder.glob("*.safetensors")):
        if path.name not in named and not _left_alone(scan, path.name):
            scan.findings.append(
                Finding("warning", "files", f"not named by {INDEX_NAME}; not read", file=path.name)
            )
