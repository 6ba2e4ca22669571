"""Which experts are worth a slot: how often steps visit them, kept in a profile."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.errors import OptionError

log = logging.getLogger(__name__)

FORMAT = "dsv4 expert profile 1"
KEPT = 0.98  # share of past visits kept with every reading of the counts
GAIN = 1.2  # a missing expert must be visited this much more often than the one it replaces
LEAST_VISITS = 2.0  # and by at least this many visits
MAX_PROFILE_BYTES = 1 << 26


class ExpertUse:
    """Decaying counts of visits, `[layers, experts]`."""

    def __init__(self, visits: Any) -> None:
        self.visits = visits
        self._seen = np.zeros(visits.shape, dtype=np.int32)

    def read(self, counts: Any) -> Any:
        """Take new counts from the device, int32 that may have wrapped around: the visits since."""
        with np.errstate(over="ignore"):
            new = counts - self._seen
        self._seen = counts.copy()
        self.visits = self.visits * KEPT + new
        return new

    def first_residents(self, slots: int) -> Any:
        """bool `[layers, experts]`: the most visited; without visits, evenly over the layers."""
        layers, experts = self.visits.shape
        layer, expert = np.divmod(np.arange(layers * experts), experts)
        order = np.lexsort((layer, expert, -self.visits.ravel()))
        found = np.zeros(layers * experts, dtype=bool)
        found[order[:slots]] = True
        return found.reshape(layers, experts)

    def swaps(self, resident: Any, most: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """(leaves, comes), the most useful first. Of equally useless ones every layer loses some:
        a prompt's staging buffer is made for an average layer."""
        visits, experts = self.visits.ravel(), self.visits.shape[1]
        inside = np.flatnonzero(resident.ravel())
        outside = np.flatnonzero(~resident.ravel())
        order = np.lexsort((inside // experts, inside % experts, visits[inside]))
        inside = inside[order][:most]
        outside = outside[np.argsort(-visits[outside], kind="stable")][:most]
        found = []
        for leaves, comes in zip(inside.tolist(), outside.tolist(), strict=False):
            gain = visits[comes] - visits[leaves]
            if visits[comes] <= GAIN * visits[leaves] or gain < LEAST_VISITS:
                break
            found.append((divmod(leaves, experts), divmod(comes, experts)))
        return found


@dataclass(frozen=True)
class ExpertProfile:
    """The file, and whose counts it keeps. Equal `digest`s are the same model."""

    path: Path
    model: str
    digest: str


def write_profile(profile: ExpertProfile, visits: Any) -> None:
    """Write the whole file or nothing."""
    path, about = profile.path, {"format": FORMAT, "model": profile.model, "digest": profile.digest}
    rows = [[round(float(value), 3) for value in row] for row in visits]
    layers, experts = visits.shape
    text = json.dumps({**about, "layers": layers, "experts": experts, "visits": rows})
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_profile(profile: ExpertProfile, layers: int, experts: int) -> Any:
    """Visits `[layers, experts]`; zeros if the file does not exist yet."""
    path = profile.path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROFILE_BYTES + 1)
    except FileNotFoundError:
        return np.zeros((layers, experts))
    except OSError as error:
        raise OptionError(f"expert_profile {path} cannot be read: {error}") from error
    try:
        if len(data) > MAX_PROFILE_BYTES:
            raise ValueError(f"more than {MAX_PROFILE_BYTES} bytes")
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        shape = found["layers"], found["experts"]
        visits = np.array(found["visits"], dtype=np.float64)
        good = visits.shape == shape and bool(np.isfinite(visits).all()) and visits.min() >= 0
        if not good:
            raise ValueError("its visits are not numbers from 0 on, a row for each layer")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"expert_profile {path} is no profile of experts ({error}); give another file, or "
            "delete it to start without one"
        ) from error
    if shape != (layers, experts):
        raise OptionError(
            f"expert_profile {path} is of another model: {shape[0]} layers of {shape[1]} experts, "
            f"this one has {layers} of {experts}; give a file of its own"
        )
    if "digest" not in found:
        log.warning(
            "expert_profile %s does not say of which model it is; it is used, and will say %r",
            path, profile.model,
        )  # fmt: skip
    elif found["digest"] != profile.digest:
        raise OptionError(
            f"expert_profile {path} is of another model, {found.get('model')!r}; this one, "
            f"{profile.model!r}, has other weights; give a file of its own, or delete it"
        )
    return visits
