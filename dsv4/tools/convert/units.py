"""The output of a conversion, planned in advance: units of matrices and their tensors.

A unit is converted as a whole: a matrix, or an expert's w1 and w3, which share one global scale.
No torch.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from dsv4.checkpoint.files.header import OutTensor, TensorInfo
from dsv4.checkpoint.names import Family, Place, spell
from dsv4.checkpoint.sources import Source
from dsv4.checkpoint.stored_matrix import StoredMatrix
from dsv4.errors import CheckpointError
from dsv4.formats.spec import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP

Target = Literal["nvfp4", "nvfp4-all", "official", "fp8", "bf16"]
TARGETS: tuple[str, ...] = get_args(Target)
FAMILY: dict[str, Family] = {
    "nvfp4": "official",  # as ModelOpt's experts-only files
    "nvfp4-all": "transformers",  # as ModelOpt's full files
    "official": "official",  # MXFP4 experts, FP8 tiles elsewhere
    "fp8": "official",
    "bf16": "hybrid",  # as transformers' save_pretrained
}
TargetFormat = Literal["keep", "nvfp4", "mxfp4", "fp8", "bf16"]
_GROUP: dict[str, tuple[str, int]] = {
    "nvfp4": ("NVFP4", NVFP4_GROUP),
    "mxfp4": ("MXFP4", MXFP4_GROUP),
}


@dataclass(frozen=True)
class Matrix:
    """One matrix or vector: its place in the model and its bytes on disk."""

    place: Place  # suffix "weight", or "" for parameters that are no module's weight
    stored: StoredMatrix
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    group: str
    format: TargetFormat
    matrices: tuple[Matrix, ...]
    family: Family

    def tensors(self) -> list[OutTensor]:
        return [t for matrix in self.matrices for t in out_tensors(matrix, self)]

    @property
    def nbytes_in(self) -> int:
        """Bytes read."""
        return sum(info.nbytes for matrix in self.matrices for info in matrix.stored.tensors)


@dataclass(frozen=True)
class Copy:
    """A tensor copied byte for byte under its own name (draft blocks)."""

    info: TensorInfo

    def tensors(self) -> list[OutTensor]:
        return [OutTensor(self.info.name, self.info.dtype, self.info.shape)]

    @property
    def nbytes_in(self) -> int:
        return self.info.nbytes


def units_of(source: Source, target: Target) -> list[Unit]:
    """The units of one parameter, one per expert."""
    family = FAMILY[target]
    stored_as = _format(source, target)
    matrices = _matrices(source)
    what, width = _GROUP.get(stored_as, ("", 1))
    for matrix in matrices if width > 1 else ():
        if matrix.shape[1] % width:
            raise CheckpointError(
                f"{matrix.stored.data.file}: tensor {matrix.stored.data.name!r} has K = "
                f"{matrix.shape[1]}, {what} needs a multiple of {width}; convert to fp8 or bf16"
            )
    step = 2 if source.name.endswith(".w13") else 1
    group = source.parameter.group
    return [
        Unit(group, stored_as, tuple(matrices[i : i + step]), family)
        for i in range(0, len(matrices), step)
    ]


def _format(source: Source, target: Target) -> TargetFormat:
    kind, stored = source.parameter.kind, source.stored
    if target == "bf16" and kind in ("linear", "plain"):
        return "keep" if stored.data.dtype == "BF16" else "bf16"
    if kind != "linear":
        return "keep"
    expert = source.parameter.group == "routed experts"
    parts = source.name.split(".")
    if target == "nvfp4":
        wanted = expert
    elif target == "nvfp4-all":
        wanted = "weights_proj" not in parts  # index head weights affect the selection: kept
    else:
        wanted = "weights_proj" not in parts and "compressor" not in parts
        if not wanted and stored.format != "plain":
            return "bf16"  # FP8 files hold these unquantised
    if not wanted:
        return "keep"
    found: TargetFormat = "nvfp4"
    if target in ("official", "fp8"):
        found = "mxfp4" if expert and target == "official" else "fp8"
    same = stored.format == found and (found != "fp8" or stored.tile == (FP8_BLOCK, FP8_BLOCK))
    return "keep" if same else found


def _matrices(source: Source) -> list[Matrix]:
    """In the order expert 0 w1, expert 0 w3, expert 1 w1, ..."""
    name, shape = source.name, source.parameter.shape
    prefix, _, leaf = name.rpartition(".")
    if leaf not in ("w13", "w2"):
        suffix = "weight" if leaf == "weight" else ""
        module = name.removesuffix(".weight")
        return [Matrix(Place(module, suffix), source.stored, shape)]
    parts = ("w1", "w3") if leaf == "w13" else ("w2",)
    rows, cols = shape[-2] // len(parts), shape[-1]
    return [
        Matrix(Place(f"{prefix}.{parts[c.part]}", "weight", c.expert), c.stored, (rows, cols))
        for c in source.matrices
    ]


def out_tensors(matrix: Matrix, unit: Unit) -> list[OutTensor]:
    """The tensors that will hold this matrix, in a fixed order."""

    def named(suffix: str) -> str:
        place = Place(matrix.place.module, suffix, matrix.place.expert)
        return spell(place, unit.family)

    stored = matrix.stored
    stored_as = stored.format if unit.format == "keep" else unit.format
    name = spell(matrix.place, unit.family)
    if stored_as in ("plain", "bf16"):
        dtype = "BF16" if stored_as == "bf16" else stored.data.dtype
        return [OutTensor(name, dtype, matrix.shape)]
    rows, cols = matrix.shape
    if stored_as == "nvfp4":
        return [
            OutTensor(name, "U8", (rows, cols // 2)),
            OutTensor(named("weight_scale"), "F8_E4M3", (rows, cols // NVFP4_GROUP)),
            OutTensor(named("weight_scale_2"), "F32", ()),
            OutTensor(named("input_scale"), "F32", ()),
        ]
    if stored_as == "mxfp4":
        return [
            OutTensor(name, "I8", (rows, cols // 2)),
            OutTensor(named("scale"), "F8_E8M0", (rows, cols // MXFP4_GROUP)),
        ]
    return [OutTensor(name, "F8_E4M3", (rows, cols)), _tile_scale(matrix, unit, named("scale"))]


def _tile_scale(matrix: Matrix, unit: Unit, name: str) -> OutTensor:
    rows, cols = matrix.shape
    if unit.format == "keep":
        scale = matrix.stored.scale
        assert scale is not None
        exponents = scale.dtype in ("F8_E8M0", "U8")
        return OutTensor(name, "F8_E8M0" if exponents else "F32", scale.shape)
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    return OutTensor(name, "F8_E8M0", grid)
