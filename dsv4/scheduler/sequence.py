"""A request being served: its tokens so far, and how many of them the state holds."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4.cache.geometry import SHARED_TOKENS
from dsv4.cache.pages import SequencePages
from dsv4.cache.prefix import block_keys
from dsv4.request import Request, TokenLogprobs

if TYPE_CHECKING:
    from dsv4.scheduler.acceptance import Acceptance
    from dsv4.scheduler.drafters import Drafter


@dataclass(eq=False)
class SequenceState:
    request: Request
    seed: int
    uses_prefix_cache: bool = True  # may use cached prefixes and add its own
    rank: tuple[int, int] = (0, 0)  # lower runs first; given by the scheduler, never changes
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    results: list[TokenLogprobs] = field(default_factory=list)  # of the output, if audited
    pages: SequencePages | None = None
    num_pending: int = 0  # tokens sampled by a step in flight
    max_len: int = 2**62  # it ends at this length at the latest
    num_cached: int | None = None  # prompt tokens from the cache; None before its first step
    num_preemptions: int = 0
    last_served: int = -1  # step
    max_computed: int = 0  # the most tokens its state ever held
    waits_for: str = "its turn"
    may_draft: bool = True
    drafter: "Drafter | None" = None  # made when it is first asked for drafts
    acceptance: "Acceptance | None" = None
    num_drafted: int = 0  # drafts verified, and those accepted
    num_accepted: int = 0
    snapshot_lens: frozenset[int] = frozenset()  # lengths at which a chunk must end for a snapshot
    kept_key: bytes | None = None  # the newest prefix kept while decoding
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_computed(self) -> int:
        return self.pages.length if self.pages is not None else 0

    @property
    def num_left(self) -> int:
        """Tokens known or in flight that the state does not hold yet; 1 while decoding."""
        known = len(self.token_ids) + self.num_pending
        return known if self.pages is None else known - self.pages.length

    @property
    def draft_room(self) -> int:
        """Drafts it can take: none past a multiple of 128, where rejected ones could not be
        overwritten, and none past its last token."""
        to_block = SHARED_TOKENS - 1 - self.num_computed % SHARED_TOKENS
        return max(min(to_block, self.max_len - self.num_computed - 2), 0)

    @property
    def is_last_pending(self) -> bool:
        """Whether the token in flight is its last one."""
        return self.num_pending > 0 and len(self.token_ids) + self.num_pending >= self.max_len

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    def keys(self) -> list[bytes]:
        """One key per whole block of the tokens known so far."""
        if len(self._keys) < len(self.token_ids) // SHARED_TOKENS:
            self._keys = block_keys(self.token_ids, self.request.cache_salt, self._keys)
        return self._keys
