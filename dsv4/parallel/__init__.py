"""Which part of the model this process holds."""

from dsv4.parallel.shard import Shard

__all__ = ["Shard"]
