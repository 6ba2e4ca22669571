"""What exchanges between ranks take: bytes, time on the link, and the kernels' part. No torch.

The kernels' part is fitted to slices of one rank on an H200, which exchanges with itself
(benchmarks/records/2026-11-18_h200_slices.jsonl). The time on the link is assumed.
"""

from dsv4.config import ModelConfig
from dsv4.parallel.channels import ROWS_FROM
from dsv4.parallel.layout import RankLayout, k_ranges
from dsv4.runner.ranks.cluster import Cluster, Interconnect
from dsv4.runner.settings import GPU_SEQUENCES

# what a rank of a tensor group does more: us for a layer of 4,096 columns (launches of exchanges,
# kernels that are not fused), and the share of the bandwidth at which it handles exchanged bytes
RANK_US, HANDLED_SHARE = 25.0, 0.035


def received_bytes(config: ModelConfig, layout: RankLayout, rows: int, comm: str) -> float:
    """Per rank and layer. Split experts exchange W2's inputs, then columns of the sums; of whole
    ones `symmetric` sends each pair from its owner, NCCL all pairs from every rank."""
    c, width, chosen = config, config.hidden_size, config.num_experts_per_tok
    tp, between = layout.tp, chosen * c.moe_intermediate_size * 2
    pairs = chosen * width * 4 * (1 if comm == "symmetric" else tp)
    if _replicated(layout, rows):
        experts = between + width * 2 if layout.split_experts else pairs
        return rows * (k_ranges(c) * width * 4 + experts) * (tp - 1) / tp
    groups = 0 if layout.data_attention else c.o_groups * c.o_lora_rank
    own = (groups * 2 + (width * 4 if layout.split_experts else pairs)) / tp
    gathers = 1 if layout.data_attention else 2
    every = gathers * width * 2 + (between if layout.split_experts else 0)
    return rows * (every + own) * (tp - 1) / tp


def rank_layer_ms(cluster: Cluster, layout: RankLayout, config: ModelConfig, rows: int) -> float:
    """What a rank computes in a layer because it is not alone; without the link's time."""
    if layout.tp == 1:
        return 0.0
    nbytes = received_bytes(config, layout, rows, cluster.comm(layout.world))
    handled = nbytes / _handled_rate(cluster)
    return RANK_US / 1e3 * config.hidden_size / 4096 + handled


def _handled_rate(cluster: Cluster) -> float:
    """Bytes in a ms."""
    return cluster.gpu.read_gbs * HANDLED_SHARE * 1e6


def layer_exchange_ms(
    cluster: Cluster, layout: RankLayout, config: ModelConfig, rows: int
) -> float:
    """Exchange time of one layer: of its bytes what the link takes longer than the kernels."""
    if layout.tp == 1:
        return 0.0
    link, comm = group_link(cluster, layout.tp), cluster.comm(layout.world)
    count = 2 if _replicated(layout, rows) else 4 if layout.data_attention else 6
    count += layout.split_experts
    nbytes = received_bytes(config, layout, rows, comm)
    longer = max(nbytes / link.gbs / 1e6 - nbytes / _handled_rate(cluster), 0.0)
    return count * link.fixed_us(comm) / 1e3 + longer


def boundaries_ms(cluster: Cluster, layout: RankLayout, config: ModelConfig, rows: int) -> float:
    """Time to send streams from stage to stage, and logits back to the first."""
    if layout.pp == 1:
        return 0.0
    link = cluster.between if layout.world > cluster.per_node else cluster.link
    share, comm = 1 if _replicated(layout, rows) else layout.tp, cluster.comm(layout.world)
    streams = rows * config.hc_mult * config.hidden_size * 2 / share
    logits = min(rows, GPU_SEQUENCES) * config.vocab_size * 4
    return (layout.pp - 1) * transfer_ms(link, comm, streams) + transfer_ms(link, comm, logits)


def group_link(cluster: Cluster, tp: int) -> Interconnect:
    return cluster.link if tp <= cluster.per_node else cluster.between


def transfer_ms(link: Interconnect, comm: str, nbytes: float) -> float:
    return link.fixed_us(comm) / 1e3 + nbytes / link.gbs / 1e6


def _replicated(layout: RankLayout, rows: int) -> bool:
    """Every rank has all rows and streams."""
    return rows < ROWS_FROM and not layout.data_attention
