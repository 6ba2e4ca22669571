"""How the ranks of a tensor group share a layer, in two ways with the same bits:

    ReplicatedRows   few rows: every rank has all rows and streams; `wo_b` by ranges of K and
                     experts are computed apart, and every rank gets all parts
    ShardedRows      many rows: streams, mHC, sums and the shared expert exist for a rank's own rows
                     only; the collapsed row is gathered, finished rows and parts go to the owner of
                     their row

Partial sums are added in one order, independent of the rank that computed them: ranges of K
ascending; experts ascending, the shared one last. `SingleRank` exchanges
nothing and uses all fusions.
"""

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.mhc import collapse_head
from dsv4.ops.fused import block
from dsv4.ops.fused.block import Mixed
from dsv4.ops.gemm.linear import linear, linear_multi, linear_ranges
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc.mix import MixSite, Residual, Update, collapse
from dsv4.ops.moe.experts import Experts, expert_parts, shared_part, sum_pairs
from dsv4.ops.moe.router import Gate, router
from dsv4.parallel.comm import Comm
from dsv4.parallel.layout import RankLayout, k_ranges

Moe = tuple[Gate, Experts]
Matrices = tuple[list[Weight], list[torch.dtype]]  # and the dtypes of their results
ROWS_FROM = 64  # rows of a step from which ranks own rows; the bits are the same on both sides


class SingleRank:
    """One rank: nothing to exchange."""

    def own(self, rows: Tensor) -> Tensor:
        """This rank's rows of something that is whole on every rank."""
        return rows

    def mix_linear(self, residual: Residual, site: MixSite, by: Matrices) -> Mixed:
        """Streams collapsed at `site`, and the products of all rows with `by`."""
        return block.mix_linear(residual, site, *by)

    def project(self, grouped: Tensor, wo_b: Weight) -> Tensor | PartialSums:
        """The groups of this rank's heads -> attention's result, of the rows that it owns."""
        return block.linear_partial_sums(grouped, wo_b)

    def experts(self, residual: Residual, site: MixSite, token_ids: Tensor, by: Moe) -> Residual:
        return block.mix_experts(residual, site, token_ids, *by)

    def hidden(self, residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
        """What the head reads: `rows` of all, or all."""
        return collapse_head(residual, site, rows)


class ReplicatedRows(SingleRank):
    def __init__(self, layout: RankLayout, comm: Comm, config: ModelConfig) -> None:
        share = k_ranges(config) // layout.tp
        self.layout, self.comm = layout, comm
        self.ranges = range(layout.tp_rank * share, (layout.tp_rank + 1) * share)
        self.held = layout.experts(config)

    def mix_linear(self, residual: Residual, site: MixSite, by: Matrices) -> Mixed:
        streams, x, post, comb = collapse(residual, site)
        return streams, post, comb, linear_multi(self.all_rows(x), *by)

    def project(self, grouped: Tensor, wo_b: Weight) -> Tensor | PartialSums:
        parts = linear_ranges(grouped, wo_b, self.ranges)
        return PartialSums(self.gather(parts).flatten(0, 1)[None], None, grouped.dtype)

    def experts(self, residual: Residual, site: MixSite, token_ids: Tensor, by: Moe) -> Residual:
        gate, experts = by
        streams, x, post, comb = collapse(residual, site)
        chosen, weights = router(x, self.own(token_ids), gate)
        parts = self.pair_parts(x, chosen, weights, experts)
        y = sum_pairs(parts, shared_part(x, experts), x.dtype)
        return Residual(streams, Update(y, post, comb))

    def pair_parts(self, x: Tensor, chosen: Tensor, weights: Tensor, by: Experts) -> Tensor:
        """fp32 `[own rows, chosen, size]`, each pair from the rank that holds its expert."""
        parts = self.gather(expert_parts(x, chosen, weights, by, self.held))
        owners = torch.div(chosen.clamp(min=0), len(self.held), rounding_mode="floor")
        index = owners[None, :, :, None].expand(1, *parts.shape[1:])
        return parts.gather(0, index)[0]

    def all_rows(self, x: Tensor) -> Tensor:
        """From those that each rank has."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.layout.tp, *x.shape)
        self.comm.gather(out, x)
        return out


class ShardedRows(ReplicatedRows):
    def __init__(self, layout: RankLayout, comm: Comm, config: ModelConfig, num_rows: int) -> None:
        super().__init__(layout, comm, config)
        self.num_rows, self.rows = num_rows, layout.rows(num_rows)
        self.owned = layout.owned(num_rows)

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.rows.start : self.rows.stop]

    def project(self, grouped: Tensor, wo_b: Weight) -> Tensor | PartialSums:
        """Finished groups go to the owner of their row, who has all of `wo_b`."""
        tp, count = self.layout.tp, len(self.rows)
        out = grouped.new_empty(tp, count, grouped.shape[1])
        self.comm.exchange(out.flatten(0, 1), grouped.contiguous(), self.owned, [count] * tp)
        return linear(out.transpose(0, 1).reshape(count, tp * grouped.shape[1]), wo_b)

    def pair_parts(self, x: Tensor, chosen: Tensor, weights: Tensor, by: Experts) -> Tensor:
        x, all_chosen, weights = map(self.all_rows, (x, chosen, weights))
        made = expert_parts(x, all_chosen, weights, by, self.held)
        owners = torch.div(all_chosen, len(self.held), rounding_mode="floor")  # padding: -1
        mine = owners == self.layout.tp_rank
        sent = [int(part.sum()) for part in torch.split(mine, self.owned)]
        wanted = [self.own(owners) == place for place in range(self.layout.tp)]
        received = [int(pairs.sum()) for pairs in wanted]
        out = made.new_empty(sum(received), made.shape[2])
        self.comm.exchange(out, made[mine], sent, received)
        parts = made.new_zeros(*chosen.shape, made.shape[2])
        for pairs, values in zip(wanted, torch.split(out, received), strict=True):
            parts[pairs] = values
        return parts

    def hidden(self, residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
        every = self.all_rows(collapse_head(residual, site, None))
        return every if rows is None else every[rows]

    def all_rows(self, x: Tensor) -> Tensor:
        missing = self.owned[0] - x.shape[0]
        return self.gather(_padded(x, missing)).flatten(0, 1)[: self.num_rows]


class Exchange:
    """A rank's exchange with others: how a step shares its layers, what lies between stages."""

    def __init__(
        self, layout: RankLayout, comm: Comm, config: ModelConfig, rows_from: int = ROWS_FROM
    ) -> None:
        self.layout, self.comm, self.config = layout, comm, config
        self.rows_from = rows_from

    def sharing(self, num_rows: int) -> SingleRank:
        if self.layout.tp == 1:
            return SingleRank()
        if num_rows < self.rows_from:
            return ReplicatedRows(self.layout, self.comm, self.config)
        return ShardedRows(self.layout, self.comm, self.config, num_rows)

    def logits(self, hidden: Tensor, head: Weight) -> Tensor:
        """fp32 `[rows, vocabulary]`, each rank's part of it beside the others'."""
        part = linear(hidden, head, torch.float32)
        if self.layout.tp == 1:
            return part
        vocab_size = self.config.vocab_size
        missing = -(-vocab_size // self.layout.tp) - part.shape[1]
        replicated = ReplicatedRows(self.layout, self.comm, self.config)
        parts = replicated.gather(_padded(part.T, missing)).flatten(0, 1)
        return parts[:vocab_size].T.contiguous()


def _padded(x: Tensor, missing: int) -> Tensor:
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
