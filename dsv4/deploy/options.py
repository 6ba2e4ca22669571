"""The operator's options for replicas. Imports without Ray: the command line lists them."""

import re
from dataclasses import dataclass, field

from dsv4.errors import OptionError

DEFAULT_SEQUENCES = 32  # per replica, if `max_sequences` is left to the engine


@dataclass(frozen=True)
class RayOptions:
    replicas: str = field(
        default="1", metadata={"help": "engines: a number, or LEAST-MOST to scale by load"}
    )
    ingress_replicas: int = field(default=1, metadata={"help": "processes that speak HTTP"})
    replica_cpus: float = field(default=1.0, metadata={"help": "CPUs that Ray reserves per rank"})
    upscale_seconds: float = field(
        default=10.0, metadata={"help": "of high load before an engine is added"}
    )
    downscale_seconds: float = field(
        default=300.0, metadata={"help": "of low load before an engine leaves"}
    )
    health_seconds: float = field(
        default=5.0, metadata={"help": "between health checks; three failed ones replace an engine"}
    )

    def __post_init__(self) -> None:
        least, most = self.limits
        if not 1 <= least <= most:
            raise OptionError(
                f"replicas is {self.replicas!r}, expected a number from 1 on or LEAST-MOST"
            )
        if self.ingress_replicas < 1:
            raise OptionError(f"ingress_replicas is {self.ingress_replicas}, expected 1 or more")
        for name in ("replica_cpus", "upscale_seconds", "downscale_seconds"):
            if not 0 <= getattr(self, name) < 1e6:
                raise OptionError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 < self.health_seconds < 1e6:
            raise OptionError(f"health_seconds is {self.health_seconds}, expected it above 0")

    @property
    def limits(self) -> tuple[int, int]:
        """The minimum and maximum number of replicas; (0, 0) if the text is invalid."""
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", str(self.replicas).strip())
        if found is None:
            return 0, 0
        return int(found.group(1)), int(found.group(2) or found.group(1))
