"""Opens and loads a checkpoint: strict, streaming, in disk order."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dsv4.checkpoint import LAYOUTS
from dsv4.checkpoint.assemble import assemble
from dsv4.checkpoint.cast import cast_stack
from dsv4.checkpoint.files.tensors import TensorFiles
from dsv4.checkpoint.findings import Finding, raise_errors
from dsv4.checkpoint.manifest import Manifest, build_manifest
from dsv4.checkpoint.rank_slices import (
    Selection,
    WeightSlice,
    check_selection,
    is_wanted,
    slice_for,
)
from dsv4.checkpoint.sources import Source
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.mxfp4 import CastReport
from dsv4.formats.quantized import Mxfp4Tensor, Weight
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)

PIECE_BYTES = 5 * 10**8  # per piece of a stack of experts


@dataclass
class LoadReport:
    """Facts collected while loading, for the summary line and for `convert`."""

    casts: dict[str, CastReport] = field(default_factory=dict)  # MXFP4 -> NVFP4, by parameter

    @property
    def inexact(self) -> list[str]:
        return [name for name, cast in self.casts.items() if not cast.exact]


class Checkpoint:
    """An opened checkpoint: the headers are read and agree with the config."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.config = manifest.config
        self.sources = manifest.sources
        self.ignored = manifest.ignored  # tensor on disk -> why the model does not use it
        self.nbytes = sum(source.nbytes for source in manifest.sources.values())
        self.gpu_bytes = sum(source.gpu_bytes for source in manifest.sources.values())

    @property
    def layout(self) -> str:
        return self.manifest.layout.name if self.manifest.layout else "mixed"

    @property
    def warnings(self) -> list[Finding]:
        return [item for item in self.manifest.findings if item.level == "warning"]

    def load(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        select: Selection | None = None,
        layers: range | None = None,
        mxfp4_as_nvfp4: bool | Callable[[str], bool] = False,
        progress: Progress | None = None,
        report: LoadReport | None = None,
    ) -> dict[str, Weight]:
        """Every selected parameter by canonical name.

        Unquantised matrices keep their dtype unless `dtype` is given; norms and mixing parameters
        are float32; quantised ones keep their format. `mxfp4_as_nvfp4` (True, or a test of the
        name) casts while loading: exact for exponent spreads up to 17, and `report` says where it
        was not.
        """
        if layers is not None:
            if select is not None:
                raise OptionError("give either layers or select, not both")
            select = Selection(layers=layers)
        return dict(self.stream(dtype, device, select, mxfp4_as_nvfp4, progress, report))

    def stream(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        select: Selection | None = None,
        mxfp4_as_nvfp4: bool | Callable[[str], bool] = False,
        progress: Progress | None = None,
        report: LoadReport | None = None,
        *,
        in_pieces: bool = False,
    ) -> Iterator[tuple[str, Weight]]:
        """Like `load`, one parameter at a time: host memory never holds the whole model. With
        `in_pieces`, stacks of experts come some experts at a time, in order."""
        select = select or Selection()
        slices = self.slices(select)
        chosen = [self.sources[name] for name in slices]
        chosen.sort(key=lambda s: (str(s.stored.data.file), s.stored.data.start))
        done, total = 0, sum(self._nbytes(source, slices[source.name]) for source in chosen)
        files = TensorFiles()
        casts = mxfp4_as_nvfp4 if callable(mxfp4_as_nvfp4) else lambda name: bool(mxfp4_as_nvfp4)

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        pieces = (
            (source, piece)
            for source in chosen
            for piece in (_pieces if in_pieces else _whole)(source, slices[source.name])
        )
        for source, cut in pieces:
            weight = assemble(source, files, cut, advance)
            if isinstance(weight, torch.Tensor):
                weight = _convert(weight, source, dtype)
            elif isinstance(weight, Mxfp4Tensor) and casts(source.name):
                weight, cast = cast_stack(weight, source)
                if report is not None:
                    report.casts[source.name] = cast
                if not cast.exact:
                    log.warning(
                        "%s: MXFP4 -> NVFP4 rounded %d of %d blocks (exponent spread %d, "
                        "relative RMS %.1e)",
                        source.name,
                        cast.inexact_blocks,
                        cast.blocks,
                        cast.spread,
                        cast.relative_rms,
                    )
            yield source.name, weight.to(device)
        assert done == total, f"{done} bytes of {total} were read"

    def slices(self, select: Selection) -> dict[str, WeightSlice]:
        """The slice of each parameter that a selection takes, without reading any."""
        check_selection(select, self.config)
        return {
            name: slice_for(name, source.parameter, select, self.config)
            for name, source in self.sources.items()
            if is_wanted(name, select, self.config)
        }

    def selected_bytes(self, select: Selection) -> int:
        """Bytes on disk of what a selection takes."""
        slices = self.slices(select)
        return sum(self._nbytes(self.sources[name], cut) for name, cut in slices.items())

    @staticmethod
    def _nbytes(source: Source, cut: WeightSlice) -> int:
        return sum(cut.nbytes(matrix) for matrix in source.matrices if cut.wants(matrix))


def _whole(source: Source, cut: WeightSlice) -> list[WeightSlice]:
    return [cut]


def _pieces(source: Source, cut: WeightSlice) -> list[WeightSlice]:
    """Cuts a stack of experts into pieces of a few experts each."""
    experts = sorted({m.expert for m in source.matrices if m.expert is not None and cut.wants(m)})
    if not experts:
        return [cut]
    count = max(1, PIECE_BYTES * len(source.matrices) // source.num_parts // source.nbytes)
    return [
        replace(cut, experts=range(start, min(start + count, experts[-1] + 1)))
        for start in range(experts[0], experts[-1] + 1, count)
    ]


def _convert(weight: torch.Tensor, source: Source, dtype: torch.dtype | None) -> torch.Tensor:
    kind = source.parameter.kind
    if kind in ("norm", "fp32"):
        return weight.to(torch.float32)
    if kind == "table" or dtype is None:
        return weight
    return weight.to(dtype)


def open_draft(folder: Path | str, config: ModelConfig) -> Checkpoint:
    """The draft blocks alone; a missing, misshapen or unknown tensor is a CheckpointError."""
    manifest = build_manifest(Path(folder), config, LAYOUTS.values(), is_draft=True)
    raise_errors(manifest.findings, str(folder))
    return Checkpoint(manifest)


def open_checkpoint(
    folder: Path | str, config: ModelConfig, *, trust_headers: bool = False
) -> Checkpoint:
    """Read all headers and match them with `config`; any contradiction is a CheckpointError.

    A config.json whose quantisation claims contradict the tensors is an error too, unless
    `trust_headers` is set: then the headers win and the contradiction is a warning.
    """
    manifest = build_manifest(Path(folder), config, LAYOUTS.values())
    if trust_headers:
        manifest.findings = [_lenient(item) for item in manifest.findings]
    raise_errors(manifest.findings, str(folder))
    return Checkpoint(manifest)


def _lenient(item: Finding) -> Finding:
    if item.check != "config":
        return item
    return Finding("warning", item.check, item.message, item.tensor, item.file, item.cause)
