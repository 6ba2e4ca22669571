"""Which part of each parameter a rank takes, from names and shapes alone. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from dsv4.checkpoint.names import Parameter, parameters
from dsv4.checkpoint.sources import SourceMatrix
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.parallel.layout import RankLayout


@dataclass(frozen=True)
class Selection:
    """A rank's share. `layers`: the first also brings the embedding, the last the head; `experts`:
    whole routed experts; `inner`: a range of rows of each W1 and W3, `outer`: of each W2; `heads`:
    whole output groups; `vocab`: rows of the head; `names`: single parameters, instead of `layers`.
    `wo_b` stays whole with `whole_wo_b`, otherwise only the heads' columns are taken."""

    layers: range | None = None
    names: frozenset[str] | None = None
    experts: range | None = None
    inner: range | None = None
    outer: range | None = None
    heads: range | None = None
    vocab: range | None = None
    whole_wo_b: bool = False


def selection(layout: RankLayout, config: ModelConfig) -> Selection:
    """What a rank reads. Each has the whole `wo_b`, because a rank owns rows of prompts."""
    if layout.world == 1:
        return Selection()
    return Selection(
        layers=layout.layers(config),
        experts=layout.experts(config),
        inner=layout.inner(config),
        outer=layout.outer(config),
        heads=layout.heads(config),
        vocab=layout.vocab(config),
        whole_wo_b=True,
    )


@dataclass(frozen=True)
class WeightSlice:
    """The wanted part of a parameter: whole experts, and a range of rows or columns of each matrix
    (the same for w1 and w3, so both halves of a joined w13 are cut alike)."""

    experts: range | None = None
    rows: range | None = None
    columns: range | None = None

    def wants(self, matrix: SourceMatrix) -> bool:
        return matrix.expert is None or self.experts is None or matrix.expert in self.experts

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a parameter of shape `whole`."""
        shape, axis = list(whole), len(whole) - 2 if len(whole) > 1 else 0
        if self.experts is not None:
            shape[0] = len(self.experts)
        if self.rows is not None:
            shape[axis] = len(self.rows) * (2 if name.endswith("w13") else 1)
        return tuple(shape)

    def nbytes(self, matrix: SourceMatrix) -> int:
        """Bytes of a wanted matrix, to within its last block."""
        kept, whole = 1, 1
        shape = matrix.stored.data.shape
        if self.rows is not None:
            kept, whole = len(self.rows), shape[0]
        elif self.columns is not None:
            packed = matrix.stored.format in ("mxfp4", "nvfp4") and matrix.stored.data.dtype != "F4"
            kept, whole = len(self.columns), shape[-1] * (2 if packed else 1)
        return sum(info.nbytes * kept // whole for info in matrix.stored.tensors)


def check_selection(select: Selection, config: ModelConfig) -> None:
    c = config
    limits = {
        "layers": c.num_layers,
        "experts": c.num_experts,
        "inner": c.moe_intermediate_size,
        "outer": c.hidden_size,
        "heads": c.num_heads,
        "vocab": c.vocab_size,
    }
    for name, limit in limits.items():
        chosen = getattr(select, name)
        if chosen is None:
            continue
        if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= limit:
            raise OptionError(f"{name} {chosen} is outside 0 to {limit}")
    if select.heads is not None:
        per_group = c.num_heads // c.o_groups
        if select.heads.start % per_group or select.heads.stop % per_group:
            raise OptionError(
                f"heads {select.heads.start}:{select.heads.stop} cut through an output group "
                f"of {per_group} heads; cut between groups"
            )


def is_wanted(name: str, select: Selection, config: ModelConfig) -> bool:
    if select.names is not None:
        return name in select.names
    if select.layers is None:
        return True
    if name.startswith("layers."):
        return int(name.split(".")[1]) in select.layers
    if name == "embed.weight":
        return 0 in select.layers
    return config.num_layers - 1 in select.layers


def slice_for(
    name: str, parameter: Parameter, select: Selection, config: ModelConfig
) -> WeightSlice:
    """The part that the selection takes of a wanted parameter."""
    c = config
    if parameter.group == "routed experts":
        if name.endswith("w13"):
            return WeightSlice(experts=select.experts, rows=select.inner)
        return WeightSlice(experts=select.experts, rows=select.outer)
    if name == "head.weight":
        return WeightSlice(rows=select.vocab)
    if select.heads is None or not name.startswith("layers."):
        return WeightSlice()
    low = c.o_groups * c.o_lora_rank // c.num_heads  # rows of wo_a for one head

    def scaled(factor: int) -> range:
        assert select.heads is not None
        return range(select.heads.start * factor, select.heads.stop * factor)

    place = name.split(".", 2)[2]
    if place == "attn.wq_b.weight":
        return WeightSlice(rows=scaled(c.head_dim))
    if place == "attn.attn_sink":
        return WeightSlice(rows=scaled(1))
    if place == "attn.wo_a.weight":
        return WeightSlice(rows=scaled(low))
    if place == "attn.wo_b.weight" and not select.whole_wo_b:
        return WeightSlice(columns=scaled(low))
    return WeightSlice()


def held_parts(
    config: ModelConfig, nbytes: Mapping[str, int], layout: RankLayout
) -> dict[str, int]:
    """Bytes that a rank holds of each of its parameters; `nbytes`: of the whole parameters."""
    select, held = selection(layout, config), {}
    for name, parameter in parameters(config).items():
        if is_wanted(name, select, config):
            taken = slice_for(name, parameter, select, config)
            left = prod(taken.shape(name, parameter.shape))
            held[name] = nbytes[name] * left // prod(parameter.shape)
    return held
