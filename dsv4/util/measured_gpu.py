"""The rates of this machine's GPUs as `doctor` measured them, in the user's cache folder."""

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredGpu:
    name: str  # as the driver reports it
    architecture: int  # 90: sm_90
    memory_bytes: int
    read_gbs: float
    tflops: float  # bf16


def measured_file() -> Path:
    """One file for all GPUs, keyed by name: machines may share the folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "dsv4" / "gpus.json"


def load_measured() -> dict[str, MeasuredGpu]:
    """By name, newest last. An unreadable file is reported in the log."""
    path = measured_file()
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {row["name"]: MeasuredGpu(**row) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is ignored (%s); dsv4 doctor writes it anew", path, error)
        return {}


def save_measured(gpu: MeasuredGpu) -> None:
    """Save these rates; a folder that cannot be written is reported in the log."""
    path, known = measured_file(), load_measured()
    known.pop(gpu.name, None)
    text = json.dumps([asdict(row) for row in (*known.values(), gpu)], indent=1)
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)  # whole or not at all
    except OSError as error:
        log.warning("the measured bandwidth is not kept: %s", error)
