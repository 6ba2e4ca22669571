"""Which tokens run next. No tensors."""

from dsv4.scheduler.audit import Audit, AuditedAnswer
from dsv4.scheduler.drafts import Drafting
from dsv4.scheduler.home import Home
from dsv4.scheduler.scheduler import ScheduledTokens, Scheduler
from dsv4.scheduler.sequence import SequenceState

__all__ = [
    "Audit",
    "AuditedAnswer",
    "Drafting",
    "Home",
    "ScheduledTokens",
    "Scheduler",
    "SequenceState",
]
