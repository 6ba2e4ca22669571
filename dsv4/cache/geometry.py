"""Sizes of the state, without torch: the engine allocates with them and `plan` prints them.

Three pools of pages, each with its own page table:

    window   the key of every token, all layers; pages behind the window are freed
    csa      one entry and one index key per 4 tokens, ratio-4 layers
    hca      one entry per 128 tokens, ratio-128 layers

All layers of a pool share page numbers: page 7 is page 7 in each of them. In addition to its pages
a sequence holds one slot with the compressors' newest rows.
"""

from dataclasses import dataclass
from typing import Literal

from dsv4.config import ModelConfig
from dsv4.formats.entry import entry_bytes, index_entry, kv_entry
from dsv4.formats.spec import CSA_ROWS

Pool = Literal["window", "csa", "hca"]
POOLS: tuple[Pool, ...] = ("window", "csa", "hca")
GROWING_POOLS: tuple[Pool, ...] = ("csa", "hca")  # window pages are sized for every slot

# Entries per page. Window and csa pages end on 128-token boundaries, where prefixes are shared.
PAGE_ENTRIES: dict[Pool, int] = {"window": 64, "csa": 32, "hca": 32}
TOKENS_PER_ENTRY: dict[Pool, int] = {"window": 1, "csa": 4, "hca": 128}

# Prefixes are shared at multiples of this: no block of 4 or 128 tokens is open there, and window
# and csa pages are full.
SHARED_TOKENS = 128
MOST_DRAFT_ROWS = 8  # of a sequence: its newest token and drafts
CARRIED_ROWS = 4  # of a ratio-4 compressor: the block before the boundary, read by the next


@dataclass(frozen=True)
class Geometry:
    """Pages and bytes that sequences need, for one model and one choice of formats."""

    config: ModelConfig
    kv_format: str
    index_format: str
    chunk_tokens: int  # most prompt tokens of one step, over all sequences
    kept_prefixes: int = 0  # snapshots of the prefix cache, for each sequence that may run
    layers: range | None = None  # the stage's layers that bytes count; page numbers are global
    draft_layers: int = 0  # window-only draft blocks
    spare_tokens: int = 0  # of the window, past a step's tokens, where draft blocks guess

    @property
    def lookback(self) -> int:
        """Tokens of the window that a sequence needs; drafters see one more than the next token
        does, since they draft after the newest stored token."""
        return self.config.sliding_window - 1 + (self.spare_tokens > 0)

    @property
    def window_columns(self) -> int:
        """Width of the window's page table: a ring that holds the window and one chunk, or the rows
        of two steps with drafts."""
        tokens = self.lookback + max(self.chunk_tokens, 2 * MOST_DRAFT_ROWS)
        return -(-(tokens + self.spare_tokens) // PAGE_ENTRIES["window"]) + 1

    def pages_needed(self, pool: Pool, start: int, end: int) -> range:
        """Page columns in use while a sequence grows from `start` to `end` tokens."""
        page = PAGE_ENTRIES[pool]
        if pool == "window":
            return range(self.oldest_column(start), -(-end // page))
        if self.num_layers(pool) == 0:
            return range(0)
        return range(-(-(end // TOKENS_PER_ENTRY[pool]) // page))

    def oldest_column(self, length: int) -> int:
        """The window's first page that a sequence of `length` tokens still needs."""
        return max(length - self.lookback, 0) // PAGE_ENTRIES["window"]

    def last_use(self, column: int) -> int:
        """The length up to which a window page is needed."""
        return (column + 1) * PAGE_ENTRIES["window"] + self.lookback - 1

    def most_tokens(self, columns: dict[Pool, int]) -> int:
        """The longest sequence for which pages up to these columns suffice."""
        return min(
            (columns[pool] * PAGE_ENTRIES[pool] + 1) * TOKENS_PER_ENTRY[pool] - 1
            for pool in POOLS
            if self.num_layers(pool)
        )

    def num_layers(self, pool: Pool) -> int:
        if pool == "window":
            return self.config.num_layers
        return self.config.num_layers_of(pool)

    def most_pages(self, pool: Pool, max_context: int) -> int:
        """Most pages a sequence of up to `max_context` tokens holds; see also `chunk_pages`."""
        if pool == "window":
            page = PAGE_ENTRIES["window"]
            spanned = -(-self.lookback // page) + 2 + (self.spare_tokens > 0)
            return min(spanned, -(-max_context // page))
        return len(self.pages_needed(pool, 0, max_context))

    @property
    def chunk_pages(self) -> int:
        """Window pages that a step's prompt tokens need beyond `most_pages`, over all sequences;
        they are freed when the step is done."""
        return -(-self.chunk_tokens // PAGE_ENTRIES["window"])

    def num_pages(
        self, max_context: int, max_sequences: int, state_tokens: int | None = None
    ) -> dict[Pool, int]:
        """Pages of each pool for sequences of `state_tokens` tokens in all, and the cache.

        Without `state_tokens` every slot can hold a full-length sequence.
        """
        pages = {pool: self.most_pages(pool, max_context) * max_sequences for pool in POOLS}
        if state_tokens is not None:
            for pool in GROWING_POOLS:
                # a sequence's last page may be nearly empty
                together = len(self.pages_needed(pool, 0, state_tokens)) + max_sequences
                pages[pool] = min(pages[pool], together)
        num_snapshots = self.kept_prefixes * max_sequences
        pages["window"] += self.chunk_pages + num_snapshots * self.snapshot_pages
        if self.num_layers("hca"):
            pages["hca"] += num_snapshots  # every cached prefix holds at least one
        return pages

    @property
    def snapshot_pages(self) -> int:
        """Window pages that a cached prefix holds at its boundary."""
        end = 2**20
        return len(self.pages_needed("window", end, end))

    def snapshot_bytes(self) -> int:
        """Compressor rows that a cached prefix holds in addition to its pages."""
        width = self.config.head_dim + self.config.index_head_dim
        return self._num_layers("csa") * CARRIED_ROWS * width * 2 * 4

    def kv_entry_bytes(self) -> int:
        return entry_bytes(
            kv_entry(self.kv_format, self.config.head_dim, self.config.rope_head_dim)
        )

    def index_entry_bytes(self) -> int:
        return entry_bytes(index_entry(self.index_format, self.config.index_head_dim))

    def page_bytes(self, pool: Pool) -> int:
        """Bytes of one page over all layers of its pool."""
        size = self.kv_entry_bytes()
        if pool == "csa":
            size += self.index_entry_bytes()
        return size * PAGE_ENTRIES[pool] * self._num_layers(pool)

    def bytes_per_token(self, pool: Pool) -> float:
        """Growth per token of context; the window does not grow."""
        if pool == "window":
            return 0.0
        return self.page_bytes(pool) / PAGE_ENTRIES[pool] / TOKENS_PER_ENTRY[pool]

    def slot_bytes(self) -> int:
        """Compressor rows of one sequence: values and gates in fp32."""
        c = self.config
        csa = CSA_ROWS * 2 * (c.head_dim + c.index_head_dim) * 2 * 4
        hca = 128 * c.head_dim * 2 * 4
        return self._num_layers("csa") * csa + self._num_layers("hca") * hca

    def _num_layers(self, pool: Pool) -> int:
        """Layers of this pool that bytes count."""
        kinds = self.config.kinds
        held = kinds if self.layers is None else [kinds[layer] for layer in self.layers]
        return len(held) + self.draft_layers if pool == "window" else held.count(pool)

    def sequence_bytes(self, max_context: int) -> int:
        """State of one sequence of `max_context` tokens, between steps."""
        pages = sum(self.page_bytes(p) * self.most_pages(p, max_context) for p in POOLS)
        return pages + self.slot_bytes()

    def state_bytes(
        self, max_context: int, max_sequences: int, state_tokens: int | None = None
    ) -> int:
        """State of a whole engine."""
        pages = self.num_pages(max_context, max_sequences, state_tokens)
        held = sum(self.page_bytes(pool) * count for pool, count in pages.items())
        slots = self.slot_bytes() + self.kept_prefixes * self.snapshot_bytes()
        return held + slots * max_sequences
