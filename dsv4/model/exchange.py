"""Ways for the ranks of a tensor group to share a layer, with bit-identical results:

    ReplicatedRows   few rows: every rank has all rows and streams; each computes its ranges of K
                     of `wo_b` and its experts, and every rank gets all parts
    ShardedRows      many rows: a rank has streams, mHC, sums and the shared expert for its own rows
                     only; collapsed rows are gathered, finished rows and parts go to the row's
                     owner
    HomedRows        data-parallel attention: a rank has all heads and the rows of its own
                     sequences, any number of them; only experts are shared, as with ShardedRows

Partial sums are added in one fixed order, whichever rank computed them: ranges of K ascending;
experts ascending, the shared one last. `SingleRank` exchanges nothing and uses all fusions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight, activations_of
from dsv4.model.inputs import HomeRows
from dsv4.model.mhc import collapse_head
from dsv4.ops.comm.own_experts import own_experts
from dsv4.ops.comm.sharded import (
    combine_experts,
    expert_sums,
    linear_ranges,
    shared_expert,
    split_experts,
    sum_in_order,
)
from dsv4.ops.fused import block
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.gemm.quantize_rows import shares_scales
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc.mix import MixSite, Residual, Update, collapse
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.router import Gate, router
from dsv4.parallel.channels import ROWS_FROM
from dsv4.parallel.comm import Comm
from dsv4.parallel.layout import RankLayout, k_ranges

Moe = tuple[Gate, Experts]
Projections = tuple[list[Weight], list[torch.dtype]]  # weights, dtypes of their results
Mixed = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # streams, post, comb, products


class SingleRank:
    """One rank: nothing to exchange."""

    def own(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor that every rank has in full."""
        return rows

    def mix_linear(self, residual: Residual, site: MixSite, by: Projections) -> Mixed:
        """Streams collapsed at `site`, and the products of all rows with `by`."""
        streams, x, post, comb = collapse(residual, site)
        return streams, post, comb, linear_multi(self.all_rows(x), *by)

    def all_rows(self, x: Tensor) -> Tensor:
        """The rows of all ranks, gathered."""
        return x

    def project(self, out: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor | PartialSums:
        """`[tokens, groups, k]` of this rank's heads -> attention's result for its own rows."""
        return block.output_projections(out, wo_a, wo_b)

    def experts(self, residual: Residual, site: MixSite, token_ids: Tensor, by: Moe) -> Residual:
        streams, x, post, comb = collapse(residual, site)
        return Residual(streams, Update(block.router_experts(x, token_ids, *by), post, comb))

    def hidden(self, residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
        """The head's input: all rows, or only `rows`."""
        return collapse_head(residual, site, rows)


class ReplicatedRows(SingleRank):
    def __init__(
        self, layout: RankLayout, comm: Comm, config: ModelConfig, load: Tensor | None = None
    ) -> None:
        """`load`: see `own_experts`."""
        self.load = load
        share = k_ranges(config) // layout.tp
        self.layout, self.comm, self.push = layout, comm, comm.pushes
        self.ranges = range(layout.tp_rank * share, (layout.tp_rank + 1) * share)
        self.held = layout.experts(config)

    def project(self, out: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor | PartialSums:
        grouped = grouped_linear(out, wo_a)
        if shares_scales(activations_of(wo_b), grouped.shape[1] // len(self.ranges)):
            return linear(self.all_columns(grouped), wo_b)
        own = linear_ranges(grouped, wo_b, self.ranges)
        if self.push is not None:
            return self.push.sum_ranges(own.values[0], own.factor, own.dtype)
        every = self.gather(own.values[0]).flatten(0, 1)
        return PartialSums(every[None], own.factor, own.dtype).total()

    def experts(self, residual: Residual, site: MixSite, token_ids: Tensor, by: Moe) -> Residual:
        gate, experts = by
        streams, x, post, comb = collapse(residual, site)
        chosen, weights = router(x, self.own(token_ids), gate)
        y = self.expert_rows(x, chosen, weights, experts)
        return Residual(streams, Update(y, post, comb))

    def expert_rows(self, x: Tensor, chosen: Tensor, weights: Tensor, by: Experts) -> Tensor:
        """Each pair comes from the rank that holds its expert; every rank has the shared expert.
        With split experts, a rank has all pairs but only a range of their sum's columns."""
        if self.layout.split_experts:
            shared = self.own_columns(shared_expert(x, by))  # first: both use one workspace
            sums = split_experts(x, chosen, weights, by, self.all_columns)
            return self.all_columns(combine_experts(sums, shared, x.dtype))
        local = own_experts(chosen, self.held, self.load)
        made = expert_sums(x, local, weights, by, with_shared=True)
        if self.push is not None:
            return self.push.sum_pairs(made.sums, local, made.extra, None)
        pairs = self.from_owners(self.gather(made.pairs(chosen.shape[1])), chosen)
        return combine_experts(pairs.unsqueeze(2), made.shared(), x.dtype)

    def from_owners(self, pairs: Tensor, chosen: Tensor) -> Tensor:
        """`[ranks, rows, chosen, size]` -> each pair from the rank that holds its expert."""
        owners = torch.div(chosen.clamp(min=0), len(self.held), rounding_mode="floor")
        return pairs.gather(0, owners[None, :, :, None].expand(1, *pairs.shape[1:]))[0]

    def all_columns(self, x: Tensor) -> Tensor:
        """`[rows, width]` of each rank -> `[rows, ranks * width]`."""
        return self.gather(x).transpose(0, 1).reshape(x.shape[0], -1)

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's range of columns."""
        return x.chunk(self.layout.tp, 1)[self.layout.tp_rank].contiguous()

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.layout.tp, *x.shape)
        self.comm.gather(out, x)
        return out


class ShardedRows(ReplicatedRows):
    def __init__(
        self,
        layout: RankLayout,
        comm: Comm,
        config: ModelConfig,
        owned: Sequence[int],
        load: Tensor | None = None,
    ) -> None:
        """`owned`: rows of each rank, which follow each other. Ranks that push own as many as rank
        0 each, until none is left."""
        super().__init__(layout, comm, config, load)
        self.owned, first = list(owned), sum(owned[: layout.tp_rank])
        self.rows = range(first, first + owned[layout.tp_rank])

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.rows.start : self.rows.stop]

    def project(self, out: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor | PartialSums:
        """Finished groups go to the owner of their row, who has all of `wo_b`."""
        return linear(self.to_owners(grouped_linear(out, wo_a)), wo_b)

    def expert_rows(self, x: Tensor, chosen: Tensor, weights: Tensor, by: Experts) -> Tensor:
        """Each pair goes to the owner of its row, who has computed the shared expert for it."""
        shared = shared_expert(x, by)
        every_x, every, weights = map(self.all_rows, (x, chosen, weights))
        if self.layout.split_experts:
            sums = split_experts(every_x, every, weights, by, self.all_columns)
            sums = self.to_owners(sum_in_order(sum_in_order(sums, 2), 1))
            return combine_experts(sums[:, None, None], shared, x.dtype)
        local = own_experts(every, self.held, self.load)
        made = expert_sums(every_x, local, weights, by, with_shared=False)
        if self.push is not None:
            return self.push.sum_pairs(made.sums, local, shared, self.owned[0])
        size, count = x.shape[1], len(self.rows)
        pairs = self.to_owners(made.pairs(chosen.shape[1]).flatten(1))
        pairs = pairs.view(count, self.layout.tp, chosen.shape[1], size).transpose(0, 1)
        return combine_experts(self.from_owners(pairs, chosen).unsqueeze(2), shared, x.dtype)

    def to_owners(self, x: Tensor) -> Tensor:
        """`[all rows, width]` of each rank -> `[own rows, ranks * width]`."""
        tp, count, x = self.layout.tp, len(self.rows), x.contiguous()
        if self.push is not None:
            return self.push.to_owners(x, self.owned[0])
        out = x.new_empty(tp, count, x.shape[1])
        self.comm.exchange(out.flatten(0, 1), x, self.owned, [count] * tp)
        return out.transpose(0, 1).reshape(count, tp * x.shape[1])

    def hidden(self, residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
        every = self.all_rows(collapse_head(residual, site, None))
        return every if rows is None else every[rows]

    def all_rows(self, x: Tensor) -> Tensor:
        missing = self.owned[0] - x.shape[0]
        return self.gather(_padded(x, missing)).flatten(0, 1)[: sum(self.owned)]


class HomedRows(ShardedRows):
    def __init__(
        self,
        layout: RankLayout,
        comm: Comm,
        config: ModelConfig,
        homes: HomeRows,
        load: Tensor | None,
    ) -> None:
        most, rows = max(homes.rows), homes.rows
        if comm.pushes is not None:  # even rows; on a GPU only scores without graphs are not
            rows = (most,) * layout.tp
        super().__init__(layout, comm, config, rows, load)
        self.homes, self.missing = homes, rows[layout.tp_rank] - homes.rows[layout.tp_rank]

    def own(self, rows: Tensor) -> Tensor:
        return rows

    def all_rows(self, x: Tensor) -> Tensor:
        most = max(self.owned)
        every = self.gather(_padded(x, most - x.shape[0]))
        if min(self.owned) == most:
            return every.flatten(0, 1)
        return torch.cat([rows[:count] for rows, count in zip(every, self.owned, strict=True)])

    def expert_rows(self, x: Tensor, chosen: Tensor, weights: Tensor, by: Experts) -> Tensor:
        every, chosen, weights = (_padded(part, self.missing) for part in (x, chosen, weights))
        return super().expert_rows(every, chosen, weights, by)[: x.shape[0]]

    def mix_linear(self, residual: Residual, site: MixSite, by: Projections) -> Mixed:
        """Attention stays at home: nothing is gathered."""
        streams, x, post, comb = collapse(residual, site)
        return streams, post, comb, linear_multi(x, *by)

    def project(self, out: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor | PartialSums:
        return SingleRank.project(self, out, wo_a, wo_b)

    def hidden(self, residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
        """Rows of all homes in the order of the logits; a range of the vocabulary needs all."""
        own, most = collapse_head(residual, site, rows), max(self.homes.logits)
        every = self.gather(_padded(own, most - own.shape[0])).flatten(0, 1)
        return every[self.homes.order]


class Exchange:
    """A rank's exchange with the others: inside a step's layers, and between stages."""

    def __init__(
        self, layout: RankLayout, comm: Comm, config: ModelConfig, rows_from: int = ROWS_FROM
    ) -> None:
        self.layout, self.comm, self.config = layout, comm, config
        self.rows_from = rows_from
        self.expert_load: Tensor | None = None  # see `own_experts`; only in steps with few rows

    def sharing(self, num_rows: int, homes: HomeRows | None = None) -> SingleRank:
        if self.layout.tp == 1:
            return SingleRank()
        ends = self.layout, self.comm, self.config
        if homes is not None:
            load = self.expert_load if sum(homes.rows) < self.rows_from else None
            return HomedRows(*ends, homes, load)
        if num_rows < self.rows_from:
            return ReplicatedRows(*ends, self.expert_load)
        return ShardedRows(*ends, self.layout.owned(num_rows))

    def logits(self, hidden: Tensor, head: Weight) -> Tensor:
        """fp32 `[rows, vocabulary]`, the ranks' parts concatenated."""
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
