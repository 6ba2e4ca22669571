"""Memory that exchanges between GPUs need. No torch.

GPUs that write to each other's memory have channels; the plan and the engine use the same function.
A channel has two halves, used in turn; data that does not fit a half is exchanged in several
rounds. NCCL has buffers of its own, and moves tensors that exist only while it does.
"""

from dataclasses import dataclass

from dsv4.config import ModelConfig
from dsv4.parallel.layout import RankLayout, k_ranges

ROWS_FROM = 64  # ranks own rows in steps of at least this many; the bits are the same either way
MOST_BYTES = 64 << 20  # per half
ALIGNED = 256
SHARED_BYTES = 256 << 10  # per rank, in the channel between all ranks
NCCL_BYTES = 500 * 10**6  # of a communicator, assumed: NVIDIA/nccl#864 tells of more and of less


@dataclass(frozen=True)
class ChannelBytes:
    """Bytes of half a channel: inside a tensor group, from stage to stage, for logits back to rank
    0, and between all ranks."""

    tensor: int
    streams: int
    logits: int
    world: int

    def held(self, layout: RankLayout) -> int:
        """Bytes of all of a rank's channels, both halves."""
        ends = (0, layout.logits_rank)
        used = [self.world if layout.world > 1 else 0, self.tensor if layout.tp > 1 else 0]
        used += [0 if layout.is_first else self.streams, 0 if layout.is_last else self.streams]
        used += [self.logits if layout.pp > 1 and layout.rank in ends else 0]
        return 2 * sum(used)


def channel_bytes(
    config: ModelConfig, layout: RankLayout, chunk_tokens: int, max_sequences: int
) -> ChannelBytes:
    """For steps of up to these sizes. Sums over ranges of K take one round. So do logits: the last
    stage must never wait for rank 0, which may be sending it the next step."""
    c, tp, width = config, layout.tp, config.hidden_size
    rows = chunk_tokens + max_sequences - 1
    logits = max_sequences * c.vocab_size * 4
    few = min(ROWS_FROM - 1, rows)
    ranges, pairs = few * k_ranges(c) * width * 4, c.num_experts_per_tok * width * 4
    groups = c.o_groups * c.o_lora_rank * 2
    own = -(-rows // tp)
    widest = max(few * pairs, own * pairs, own * groups, own * tp * width * 2, logits)
    streams = own * c.hc_mult * width * 2

    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGNED) * ALIGNED

    return ChannelBytes(
        aligned(max(ranges, min(widest, MOST_BYTES))),
        aligned(min(streams, MOST_BYTES)),
        aligned(logits),
        aligned(SHARED_BYTES * layout.world),
    )


def exchange_bytes(
    config: ModelConfig, layout: RankLayout, chunk_tokens: int, max_sequences: int, comm: str
) -> int:
    """GPU memory of a rank for exchanges over this back end."""
    if layout.world == 1:
        return 0
    if comm == "symmetric":
        return channel_bytes(config, layout, chunk_tokens, max_sequences).held(layout)
    ends = layout.pp > 1 and layout.rank in (0, layout.logits_rank)
    moved = _moved_bytes(config, layout, chunk_tokens + max_sequences - 1)
    return NCCL_BYTES * (1 + (layout.tp > 1) + ends) + moved


def _moved_bytes(config: ModelConfig, layout: RankLayout, rows: int) -> int:
    """The largest exchange of a prompt, to the owners of its rows: as sent, as received, and as
    received in the order of rows (`ShardedRows.to_owners`)."""
    c, tp = config, layout.tp
    if tp == 1:
        return 0
    chosen = 1 / tp if layout.split_experts else c.num_experts_per_tok
    groups = 0 if layout.data_attention else c.o_groups * c.o_lora_rank * 2 // tp
    return 3 * rows * max(int(chosen * c.hidden_size) * 4, groups)
