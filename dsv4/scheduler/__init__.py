"""Which tokens run next. No tensors."""

from dsv4.scheduler.audit import Audit, AuditedAnswer
from dsv4.scheduler.scheduler import ScheduledTokens, Scheduler
from dsv4.scheduler.sequence import SequenceState

__all__ = ["Audit", "AuditedAnswer", "ScheduledTokens", "Scheduler", "SequenceState"]
