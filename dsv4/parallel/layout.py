"""Which part of the model a rank holds. No torch.

The world is `pp` stages of `tp` ranks; rank = stage * tp + place in the stage's tensor group. A
stage has consecutive layers. Inside a tensor group a rank has whole output groups of heads, whole
experts and a range of the vocabulary; the rest, and the state, is replicated. With data-parallel
attention a rank has all heads, and the state of its own sequences only: it is their *home*.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from dsv4.config import ModelConfig
from dsv4.errors import OptionError

MOST_TP = 8  # ranks of a tensor group: more would span nodes and cut the shared expert's tiles


@dataclass(frozen=True)
class RankLayout:
    """`stages`: the layers of each stage, from `balance`; not needed for a single stage.
    `split_experts`: a rank has a range of every expert instead of whole experts.
    `data_attention`: a rank has all heads, for the sequences whose home it is."""

    tp: int = 1
    pp: int = 1
    rank: int = 0
    stages: tuple[range, ...] = ()
    split_experts: bool = False
    data_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{name} is {value!r}, expected a whole number above 0")
        if not 0 <= self.rank < self.world:
            raise OptionError(
                f"rank is {self.rank}, expected 0 to {self.world - 1} (tp {self.tp} x pp {self.pp})"
            )
        if self.pp > 1 and len(self.stages) != self.pp:
            raise OptionError(
                f"layers of {len(self.stages)} stages are given, expected {self.pp}; see balance()"
            )

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        """In the first stage, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """In the last stage, which has the head."""
        return self.stage == self.pp - 1

    @property
    def group(self) -> range:
        """The ranks of this stage's tensor group."""
        return range(self.stage * self.tp, (self.stage + 1) * self.tp)

    @property
    def homes(self) -> int:
        """How many ranks of a tensor group have sequences of their own."""
        return self.tp if self.data_attention else 1

    @property
    def logits_rank(self) -> int:
        """The rank that sends the logits to rank 0, which samples."""
        return (self.pp - 1) * self.tp

    def heads(self, config: ModelConfig) -> range:
        groups, each = self.groups(config), config.num_heads // config.o_groups
        return range(groups.start * each, groups.stop * each)

    def groups(self, config: ModelConfig) -> range:
        return range(config.o_groups) if self.data_attention else self._share(config.o_groups)

    def experts(self, config: ModelConfig) -> range:
        return range(config.num_experts) if self.split_experts else self._share(config.num_experts)

    def inner(self, config: ModelConfig) -> range | None:
        """The rows of W1 and W3 if experts are split; None: all."""
        return self._share(config.moe_intermediate_size) if self.split_experts else None

    def outer(self, config: ModelConfig) -> range | None:
        """The rows of W2 if experts are split; None: all."""
        return self._share(config.hidden_size) if self.split_experts else None

    def vocab(self, config: ModelConfig) -> range:
        """Equal shares; the last may be shorter."""
        share = -(-config.vocab_size // self.tp)
        stop = min((self.tp_rank + 1) * share, config.vocab_size)
        return range(min(self.tp_rank * share, stop), stop)

    def layers(self, config: ModelConfig) -> range:
        return self.stages[self.stage] if self.pp > 1 else range(config.num_layers)

    def rows(self, num_rows: int) -> range:
        """The rows that this rank owns in steps where ranks own rows."""
        share = -(-num_rows // self.tp)
        stop = min((self.tp_rank + 1) * share, num_rows)
        return range(min(self.tp_rank * share, stop), stop)

    def owned(self, num_rows: int) -> list[int]:
        """How many rows each rank of the tensor group owns."""
        return [len(replace(self, rank=rank).rows(num_rows)) for rank in self.group]

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that this layout does not fit."""
        allowed = allowed_tp(config, data_attention=self.data_attention)
        if self.tp not in allowed:
            most = MOST_TP if self.data_attention else k_ranges(config)
            groups = "" if self.data_attention else f" ({config.o_groups} output groups)"
            raise OptionError(
                f"tp is {self.tp}, expected a divisor of {most}{groups} "
                f"that divides {config.num_experts} experts: {', '.join(map(str, allowed))}"
            )
        if self.data_attention and self.tp == 1:
            raise OptionError(
                "attention is 'dp' with tp 1, expected several ranks, each with sequences of its "
                "own; give tp, or leave attention out"
            )
        sizes = config.moe_intermediate_size, config.hidden_size
        if self.split_experts and any(size % self.tp for size in sizes):
            raise OptionError(
                f"experts is 'split' with tp {self.tp}, expected one that divides their inner "
                f"size {sizes[0]} and the hidden size {sizes[1]}; use experts=whole"
            )
        if self.pp > config.num_layers:
            raise OptionError(
                f"pp is {self.pp}, expected at most {config.num_layers}, the model's layers"
            )
        covered = [layer for stage in self.stages for layer in stage]
        if self.pp > 1 and covered != list(range(config.num_layers)):
            raise OptionError(
                f"the stages have layers {covered}, expected 0 to {config.num_layers - 1} in order"
            )

    def _share(self, count: int) -> range:
        share = count // self.tp
        return range(self.tp_rank * share, (self.tp_rank + 1) * share)


def allowed_tp(config: ModelConfig, *, data_attention: bool = False) -> list[int]:
    """How many ranks can share a layer of this model. Ranks with all heads share experts only."""
    most = MOST_TP if data_attention else k_ranges(config)
    return [n for n in range(1, most + 1) if most % n == 0 and config.num_experts % n == 0]


def k_ranges(config: ModelConfig) -> int:
    """How many ranges of K `wo_b` is summed in, at any tp; each is one or more output groups."""
    return gcd(config.o_groups, MOST_TP)


def balance(costs: Sequence[int], pp: int, first: int = 0, last: int = 0) -> tuple[range, ...]:
    """Split the layers into consecutive stages, minimising the cost of the most expensive one.
    `costs`: per layer; `first`, `last`: extra for the first (embedding) and last (head) stage."""
    count = len(costs)
    if not 1 <= pp <= count:
        raise OptionError(f"pp is {pp}, expected 1 to {count}, the model's layers")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, stop: int, stage: int) -> int:
        extra = (first if stage == 0 else 0) + (last if stage == pp - 1 else 0)
        return sums[stop] - sums[start] + extra

    # best[n]: for the first n layers in the stages so far, the highest stage cost and the ends
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        n: (cost_of(0, n, 0), (n,)) for n in range(1, count - pp + 2)
    }
    for stage in range(1, pp):
        ends = range(stage + 1, count - (pp - stage - 1) + 1)
        best = {
            end: min(
                (max(best[n][0], cost_of(n, end, stage)), (*best[n][1], end))
                for n in best
                if n < end
            )
            for end in ends
        }
    ends_of = best[count][1]
    return tuple(range(a, b) for a, b in zip((0, *ends_of), ends_of, strict=False))
