"""A rank's share of heads, groups and experts. One rank holds everything."""

from dataclasses import dataclass

from dsv4.errors import OptionError


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    size: int = 1

    def split(self, count: int, what: str) -> range:
        """This rank's indices out of `count` equal things; an uneven split is refused."""
        if count % self.size:
            raise OptionError(f"{count} {what} cannot be split evenly over {self.size} ranks")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)
