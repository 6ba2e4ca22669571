"""A model parameter and the stored matrices that fill it. No torch."""

from dataclasses import dataclass

from dsv4.checkpoint.names import Parameter
from dsv4.checkpoint.stored_matrix import StoredFormat, StoredMatrix


@dataclass(frozen=True)
class SourceMatrix:
    """One matrix of a parameter: `part` counts joined matrices (0 = w1, 1 = w3)."""

    stored: StoredMatrix
    expert: int | None = None
    part: int = 0


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from. All matrices have one format."""

    name: str
    parameter: Parameter
    matrices: tuple[SourceMatrix, ...]

    @property
    def stored(self) -> StoredMatrix:
        return self.matrices[0].stored

    @property
    def format(self) -> StoredFormat:
        return self.stored.format

    @property
    def num_parts(self) -> int:
        return 1 + max(matrix.part for matrix in self.matrices)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for matrix in self.matrices for info in matrix.stored.tensors)

    @property
    def gpu_bytes(self) -> int:
        """Bytes on a GPU, where MXFP4 becomes NVFP4: one scale per 16 columns instead of 32."""
        if self.format != "mxfp4":
            return self.nbytes
        return self.nbytes + sum(c.stored.scale.nbytes for c in self.matrices if c.stored.scale)

    @property
    def layer(self) -> int | None:
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None
