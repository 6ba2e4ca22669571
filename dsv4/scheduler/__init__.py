"""Which tokens run next. No tensors."""

from dsv4.scheduler.scheduler import Scheduler, Sequence, Work

__all__ = ["Scheduler", "Sequence", "Work"]
