"""Which tokens run next. No tensors."""

from dsv4.scheduler.audit import Audit, Finding
from dsv4.scheduler.scheduler import Scheduler, Work
from dsv4.scheduler.sequence import Sequence

__all__ = ["Audit", "Finding", "Scheduler", "Sequence", "Work"]
