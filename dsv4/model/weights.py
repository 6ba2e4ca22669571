"""Named weights for building the model: each is taken exactly once."""

from collections.abc import Mapping

from torch import Tensor

from dsv4.formats.quantized import Weight


class Weights:
    """A view of the canonical name table under a prefix; `left` holds the unused names."""

    def __init__(
        self, table: Mapping[str, Weight], prefix: str = "", left: set[str] | None = None
    ) -> None:
        self._table = table
        self._prefix = prefix
        self.left = set(table) if left is None else left

    def under(self, prefix: str) -> "Weights":
        return Weights(self._table, self._prefix + prefix, self.left)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._table

    def take(self, name: str) -> Weight:
        full = self._prefix + name
        self.left.remove(full)
        return self._table[full]

    def tensor(self, name: str) -> Tensor:
        """A weight that is never quantised."""
        weight = self.take(name)
        assert isinstance(weight, Tensor), f"{self._prefix}{name} is quantised"
        return weight
