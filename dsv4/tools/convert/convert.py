"""Converts a checkpoint: streaming, resumable, verified.

The output is planned from the headers. Shards are written one by one under temporary names, read
back and then renamed; config.json comes last, so a folder that has one is complete. A journal
records finished shards, so the same command resumes an interrupted run.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dsv4
from dsv4.checkpoint.files.header import OutTensor, read_header
from dsv4.checkpoint.files.index import INDEX_NAME, read_json
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.checkpoint.files.writer import PARTIAL, ShardWriter, write_error, write_json
from dsv4.checkpoint.findings import raise_errors
from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, OptionError
from dsv4.formats.nvfp4 import SCALE_CHOICES, ScaleChoice
from dsv4.tools.convert.config import new_config
from dsv4.tools.convert.units import FAMILY, TARGETS, Copy, Target, Unit, units_of
from dsv4.tools.convert.values import CastStats, produce
from dsv4.util.progress import Progress
from dsv4.util.sizes import size_text

JOURNAL = "convert.journal.json"
REPORT = "conversion.json"
_SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)


@dataclass
class Shard:
    name: str
    units: list[Unit | Copy] = field(default_factory=list)
    nbytes: int = 0

    def tensors(self) -> list[OutTensor]:
        return [tensor for unit in self.units for tensor in unit.tensors()]


@dataclass
class Conversion:
    """The result: how exact each group of parameters is."""

    source: str
    target: str
    scales: str
    groups: dict[str, CastStats] = field(default_factory=dict)
    exact: list[str] = field(default_factory=list)  # groups without any difference
    inexact: dict[str, float] = field(default_factory=dict)  # parameter -> relative RMS
    dropped: int = 0  # draft tensors that the target layout cannot hold
    num_shards: int = 0
    nbytes: int = 0
    resumed: int = 0  # shards that an earlier run had finished

    def to_json(self) -> dict[str, Any]:
        groups = {
            name: {**asdict(s), "relative_rms": s.relative_rms, "cosine": s.cosine}
            for name, s in self.groups.items()
        }
        return {**asdict(self), "groups": groups}


def convert(
    source: Path,
    destination: Path,
    target: Target,
    *,
    scales: ScaleChoice = "max",
    shard_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> Conversion:
    """Write `destination`; a second call with the same arguments resumes an interrupted one."""
    _check_options(source, destination, target, scales, shard_bytes)
    checkpoint = open_checkpoint(source, ModelConfig.from_folder(source))
    units, dropped = _units(checkpoint, target)
    shards = _shards(units, shard_bytes)
    journal = _open_journal(destination, _digest(checkpoint, target, scales, shards))
    _check_space(destination, shards, journal)
    result = Conversion(str(source), target, scales, dropped=dropped, num_shards=len(shards))
    total = sum(unit.nbytes_in for unit in units)
    done = 0
    files = TensorFiles()
    for shard in shards:
        size = sum(unit.nbytes_in for unit in shard.units)
        if shard.name in journal["shards"]:
            result.resumed += 1
        else:
            start = done

            def advance(nbytes: int, start: int = start) -> None:
                if progress is not None:
                    progress(start + nbytes, total)

            journal["shards"][shard.name] = _write_shard(
                destination / shard.name, shard, files, scales, advance
            )
            write_json(destination / JOURNAL, journal)
        done += size
        if progress is not None:
            progress(done, total)
    _collect(result, journal, shards)
    _finish(checkpoint, destination, target, shards, result)
    return result


def _check_options(source: Path, destination: Path, target: str, scales: str, size: int) -> None:
    if target not in TARGETS:
        raise OptionError(f"target is {target!r}, expected one of {', '.join(TARGETS)}")
    if scales not in SCALE_CHOICES:
        raise OptionError(f"scales are {scales!r}, expected one of {', '.join(SCALE_CHOICES)}")
    if size < 1:
        raise OptionError(f"shard size is {size} bytes, expected more than 0")
    if destination.resolve() == source.resolve():
        raise OptionError(f"{destination} is the source itself; give another folder")
    if (destination / "config.json").exists() and not (destination / JOURNAL).exists():
        raise OptionError(f"{destination} already holds a checkpoint; give an empty folder")


def _units(checkpoint: Checkpoint, target: Target) -> tuple[list[Unit | Copy], int]:
    """In source byte order, layer by layer."""
    ordered = sorted(
        checkpoint.sources.values(), key=lambda s: (str(s.stored.data.file), s.stored.data.start)
    )
    units: list[Unit | Copy] = [unit for source in ordered for unit in units_of(source, target)]
    draft = [
        info
        for name, info in checkpoint.manifest.scan.tensors.items()
        if name.startswith("mtp.") and name in checkpoint.ignored
    ]
    if FAMILY[target] == "official":
        raise_errors(checkpoint.manifest.scan.draft_findings, str(checkpoint.manifest.folder))
        units += [Copy(info) for info in draft]  # draft blocks keep their own formats
        return units, 0
    return units, len(draft)


def _shards(units: list[Unit | Copy], shard_bytes: int) -> list[Shard]:
    shards = [Shard("")]
    for unit in units:
        size = sum(tensor.nbytes for tensor in unit.tensors())
        if shards[-1].units and shards[-1].nbytes + size > shard_bytes:
            shards.append(Shard(""))
        shards[-1].units.append(unit)
        shards[-1].nbytes += size
    for number, shard in enumerate(shards, start=1):
        shard.name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _digest(checkpoint: Checkpoint, target: str, scales: str, shards: list[Shard]) -> str:
    """Identifies this conversion, so another source, option or version cannot be mixed in."""
    found = hashlib.sha256(f"{dsv4.__version__} {target} {scales}\n".encode())
    for info in checkpoint.manifest.scan.tensors.values():
        line = (info.name, info.dtype, info.shape, info.file.name, info.start)
        found.update(f"{line}\n".encode())
    for path in checkpoint.manifest.scan.files:
        stat = path.stat()
        found.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for shard in shards:
        found.update(f"{shard.name} {shard.nbytes} {len(shard.units)}\n".encode())
    return found.hexdigest()


def _open_journal(destination: Path, digest: str) -> dict[str, Any]:
    """The journal of an earlier run of the same conversion, or a new one in an empty folder."""
    path = destination / JOURNAL
    if path.is_file():
        journal = read_json(path)
        if journal.get("conversion") != digest or not isinstance(journal.get("shards"), dict):
            raise OptionError(
                f"{destination} holds another, unfinished conversion; empty it or give another "
                "folder"
            )
        for partial in destination.glob(f".*{PARTIAL}"):
            partial.unlink()
        for name in list(journal["shards"]):
            if not (destination / name).is_file():
                del journal["shards"][name]
        return journal
    if destination.is_file():
        raise OptionError(f"{destination} is a file; give an empty or new folder")
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(destination, error) from error
    if any(destination.iterdir()):
        raise OptionError(f"{destination} is not empty; give an empty folder")
    journal = {"conversion": digest, "shards": {}}
    write_json(path, journal)
    return journal


def _check_space(destination: Path, shards: list[Shard], journal: dict[str, Any]) -> None:
    needed = sum(shard.nbytes for shard in shards if shard.name not in journal["shards"])
    free = shutil.disk_usage(destination).free
    if needed > free:
        raise CheckpointError(
            f"{destination}: {size_text(needed)} are still to be written, the disk has "
            f"{size_text(free)} free; free some space and give the same command again"
        )


def _write_shard(
    path: Path,
    shard: Shard,
    files: TensorFiles,
    scales: ScaleChoice,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Statistics by group; the file gets its final name only after it was read back."""
    groups: dict[str, CastStats] = {}
    inexact: dict[str, float] = {}
    done = 0
    with ShardWriter(path, shard.tensors()) as writer:
        for unit in shard.units:
            if isinstance(unit, Copy):
                writer.write(unit.info.name, files.tensor(unit.info))
            else:
                tensors, stats = produce(unit, files, scales)
                for planned, tensor in zip(unit.tensors(), tensors, strict=True):
                    writer.write(planned.name, tensor)
                groups.setdefault(unit.group, CastStats()).add(stats)
                if stats.exact < stats.matrices:
                    inexact[unit.matrices[0].place.module] = max(
                        stats.relative_rms, inexact.get(unit.matrices[0].place.module, 0.0)
                    )
            done += unit.nbytes_in
            advance(done)
        writer.finish()
    return {"groups": {name: asdict(stats) for name, stats in groups.items()}, "inexact": inexact}


def _collect(result: Conversion, journal: dict[str, Any], shards: list[Shard]) -> None:
    for shard in shards:
        entry = journal["shards"][shard.name]
        for name, values in entry["groups"].items():
            result.groups.setdefault(name, CastStats()).add(CastStats(**values))
        for name, rms in entry["inexact"].items():
            result.inexact[name] = max(rms, result.inexact.get(name, 0.0))
    result.exact = [name for name, s in result.groups.items() if s.exact == s.matrices]


def _copy(source: Path, destination: Path) -> None:
    try:
        shutil.copyfile(source, destination)
    except OSError as error:
        raise write_error(destination, error) from error


def _finish(
    checkpoint: Checkpoint,
    destination: Path,
    target: Target,
    shards: list[Shard],
    result: Conversion,
) -> None:
    """Write the index, side files and config.json; the result must then open as a checkpoint."""
    weight_map: dict[str, str] = {}
    for shard in shards:
        found = read_header(destination / shard.name)
        planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in shard.tensors()}
        if {name: (i.dtype, i.shape) for name, i in found.items()} != planned:
            raise CheckpointError(
                f"{destination / shard.name}: is not what this conversion writes; delete it and "
                "give the same command again"
            )
        weight_map |= dict.fromkeys(planned, shard.name)
        result.nbytes += sum(info.nbytes for info in found.values())
    metadata = {"total_size": result.nbytes}
    write_json(destination / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    for pattern in _SIDE_FILES:
        for path in checkpoint.manifest.folder.glob(pattern):
            if path.is_file():
                _copy(path, destination / path.name)
    units = [unit for shard in shards for unit in shard.units]
    config, quantization = new_config(
        checkpoint.manifest.scan.config, target, units, dsv4.__version__
    )
    if quantization is not None:
        write_json(destination / "hf_quant_config.json", quantization)
    write_json(destination / REPORT, result.to_json())
    write_json(destination / "config.json", config)
    try:
        open_checkpoint(destination, checkpoint.config)
    except CheckpointError:
        (destination / "config.json").unlink()
        raise
    (destination / JOURNAL).unlink()
