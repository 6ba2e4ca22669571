"""A rank reads its own slices and nothing else; all ranks together read everything."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint.names import parameters
from dsv4.checkpoint.rank_slices import (
    Selection,
    WeightSlice,
    held_parts,
    is_wanted,
    selection,
    slice_for,
)
from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, OptionError
from dsv4.formats.quantized import Weight
from dsv4.parallel.layout import RankLayout, balance
from dsv4.tools.plan_weights import parameter_bytes, scheme_named
from tests.checkpoint import tiny, writers

MODELS = {name: ModelConfig.builtin(name) for name in ("flash", "pro")}


def layouts(
    config: ModelConfig, tp: int, pp: int, *, split: bool = False, homes: bool = False
) -> Iterator[RankLayout]:
    stages = balance([1] * config.num_layers, pp)
    return (RankLayout(tp, pp, rank, stages, split, homes) for rank in range(tp * pp))


PLAIN = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (2, 3)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("tp", "pp", "how"),
    [
        *((*pair, "") for pair in PLAIN),
        *((*pair, how) for pair in ((2, 1), (8, 1), (4, 2)) for how in ("split", "homes")),
    ],
)
def test_cuts_cover_every_element(name: str, tp: int, pp: int, how: str) -> None:
    """Once where a parameter is sharded, once on each rank of the stage where it is not."""
    config = MODELS[name]
    table = parameters(config)
    covered: dict[str, list[WeightSlice]] = {}
    options = {how: True} if how else {}
    for layout in layouts(config, tp, pp, **options):
        select = selection(layout, config)
        for parameter, shape in table.items():
            if is_wanted(parameter, select, config):
                cut = slice_for(parameter, shape, select, config)
                covered.setdefault(parameter, []).append(cut)
    assert covered.keys() == table.keys()
    sharded = {"w13", "w2", "head"} | ({"wq_b", "attn_sink", "wo_a"} if how != "homes" else set())
    for parameter, slices in covered.items():
        assert len(slices) == tp, parameter
        experts, rows = ([getattr(cut, axis) for cut in slices] for axis in ("experts", "rows"))
        leaf = parameter.removesuffix(".weight").rpartition(".")[2]
        is_index, shape = "indexer" in parameter or "shared" in parameter, table[parameter].shape
        if leaf not in sharded or is_index:
            assert set(slices) <= {WeightSlice(), WeightSlice(rows=range(shape[0]))}, parameter
            continue
        ranges, size = (experts, shape[0]) if ".experts." in parameter else (rows, shape[0])
        if how == "split" and ".experts." in parameter and tp * pp > 1:
            halves = 2 if leaf == "w13" else 1  # W1 and W3 are cut alike
            assert set(experts) <= {None, range(shape[0])}, parameter
            ranges, size = rows, shape[1] // halves
        parts = [part or range(size) for part in ranges]  # one rank alone cuts nothing
        ends = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == ends[:-1], parameter
        assert ends[-1] == size, parameter


@pytest.mark.parametrize(
    ("name", "tp", "pp", "gigabytes"),
    [("flash", 2, 1, 80.5), ("flash", 4, 1, 42.7), ("flash", 8, 1, 23.8), ("pro", 8, 1, 120.9),
     ("pro", 8, 2, 60.6)],
)  # fmt: skip
def test_bytes_of_the_fullest_rank(name: str, tp: int, pp: int, gigabytes: float) -> None:
    """As computed by hand for the official files, `wo_b` whole on each rank."""
    config = MODELS[name]
    nbytes = parameter_bytes(config, scheme_named("official"))
    sizes = [
        sum(held_parts(config, nbytes, layout).values())
        for layout in layouts(config, tp, pp)
        if layout.tp_rank == 0
    ]
    assert max(sizes) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("name", "gigabytes"), [("flash", 27.25), ("pro", 131.4)])
def test_bytes_of_a_home(name: str, gigabytes: float) -> None:
    """As computed by hand for 8 ranks with whole attention, if the head were whole, too."""
    config = MODELS[name]
    nbytes = parameter_bytes(config, scheme_named("official"))
    held = held_parts(config, nbytes, RankLayout(8, data_attention=True))
    for part, whole in nbytes.items():
        is_divided = part == "head.weight" or ".ffn.experts." in part
        assert held[part] == (whole // 8 if is_divided else whole), part
    assert (sum(held.values()) + nbytes["head.weight"] * 7 / 8) / 1e9 == pytest.approx(
        gigabytes, abs=0.1
    )


@pytest.fixture(scope="module")
def model() -> tiny.Model:
    return tiny.random_model()


def opened(model: tiny.Model, layout: str, folder: Path) -> Checkpoint:
    writers.save(writers.LAYOUTS[layout](model), folder)
    return open_checkpoint(folder, ModelConfig.from_folder(folder))


def numbers(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


STORED = ("official", "base", "modelopt-experts", "modelopt-full", "transformers-fp8",
          "plain-transformers")  # fmt: skip


@pytest.mark.parametrize("stored", STORED)
def test_ranks_together_have_the_whole(stored: str, model: tiny.Model, tmp_path: Path) -> None:
    checkpoint = opened(model, stored, tmp_path)
    config = checkpoint.config
    whole = {name: numbers(weight) for name, weight in checkpoint.load().items()}
    held: dict[str, list[torch.Tensor]] = {}
    sums = []
    for layout in layouts(config, 2, 2):
        select, told = selection(layout, config), [(0, 0)]
        loaded = checkpoint.load(select=select, progress=lambda *pair: told.append(pair))  # noqa: B023
        assert told[-1] == (checkpoint.selected_bytes(select),) * 2
        sums.append(told[-1][0])
        for name, weight in loaded.items():
            held.setdefault(name, []).append(numbers(weight))
    assert held.keys() == whole.keys()
    saved = 0
    for name, parts in held.items():
        if parts[0].shape == whole[name].shape:
            assert all(torch.equal(part, whole[name]) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts), whole[name]), name
            saved += checkpoint._nbytes(checkpoint.sources[name], WeightSlice())
    # sharded parameters are read once, the others by both ranks of their stage
    assert abs(sum(sums) + saved - 2 * checkpoint.nbytes) <= 16 * len(whole)
    assert max(sums) < 0.45 * checkpoint.nbytes


def test_what_belongs_to_others_is_not_read(model: tiny.Model, tmp_path: Path) -> None:
    """NaN in one rank's slices is found by that rank and by nobody else."""
    written = writers.LAYOUTS["official"](model)
    dtype, data = written.disk["layers.1.attn.wq_b.weight"]
    data = data.copy()
    data[-1, -1] = 0x7F  # FP8: NaN
    written.disk["layers.1.attn.wq_b.weight"] = (dtype, data)
    dtype, data = written.disk["layers.1.ffn.experts.3.w2.scale"]
    data = data.copy()
    data[0, 0] = 0xFF  # E8M0: NaN
    written.disk["layers.1.ffn.experts.3.w2.scale"] = (dtype, data)
    dtype, data = written.disk["head.weight"]
    data = data.copy()
    data[-1, 0] = 0x7FC0  # BF16: NaN
    written.disk["head.weight"] = (dtype, data)
    writers.save(written, tmp_path)
    checkpoint = open_checkpoint(tmp_path, ModelConfig.from_folder(tmp_path))
    config = checkpoint.config
    checkpoint.load(select=selection(RankLayout(2, 1, 0), config))
    for name in ("layers.1.attn.wq_b.weight", "layers.1.ffn.experts.w2", "head.weight"):
        share = replace(
            selection(RankLayout(2, 1, 1), config), layers=None, names=frozenset([name])
        )
        with pytest.raises(CheckpointError, match="found"):
            checkpoint.load(select=share)


@pytest.mark.parametrize("shared_global", [True, False])
def test_experts_cut_along_their_inner_size(
    shared_global: bool, model: tiny.Model, tmp_path: Path
) -> None:
    """w1 and w3 alike, then joined: never a range of the joined rows."""
    written = writers.modelopt_experts(model, shared_global=shared_global)
    writers.save(written, tmp_path)
    checkpoint = open_checkpoint(tmp_path, ModelConfig.from_folder(tmp_path))
    whole = {name: numbers(weight) for name, weight in checkpoint.load().items()}
    size = checkpoint.config.moe_intermediate_size
    outer = range(8, checkpoint.config.hidden_size // 2)
    for inner in (range(size // 3), range(size // 3, size)):
        loaded = checkpoint.load(select=Selection(experts=range(1, 3), inner=inner, outer=outer))
        rows = [*inner, *(size + i for i in inner)]
        w13, w2 = (f"layers.2.ffn.experts.{leaf}" for leaf in ("w13", "w2"))
        assert torch.equal(numbers(loaded[w13]), whole[w13][1:3, rows])
        assert torch.equal(numbers(loaded[w2]), whole[w2][1:3][:, outer.start : outer.stop])
    with pytest.raises(OptionError, match="inner range"):
        checkpoint.slices(Selection(inner=range(size + 1)))
    with pytest.raises(OptionError, match="vocab range"):
        checkpoint.slices(Selection(vocab=range(2**30)))
