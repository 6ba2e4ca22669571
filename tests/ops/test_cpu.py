"""The variants of ops for few rows on a CPU give the bits of their references."""

import inspect
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.engine import Engine
from dsv4.formats.quantized import UnpackedTensor
from dsv4.formats.spec import Activations
from dsv4.ops import OPS, AnyOp
from dsv4.ops.core.arguments import copied, leaves, same_bits
from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.core.op import Fusion
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.kv.compress import CompressorState, state_rows
from dsv4.ops.mhc.mix import Update
from dsv4.ops.moe.experts import Experts
from dsv4.ops.sample.sample import SampleInputs
from dsv4.request import SamplingParams
from tests.ops.test_references import build, num_rows

VARIANTS = {name: op for name, op in OPS.items() if op.on_cpu}
ROWS = (1, 2, 5, 8)


def check(op: AnyOp, arguments: dict[str, Any]) -> None:
    """Results and everything that is written in place."""
    assert op.cpu_function is not None
    mine = copied(arguments)
    with torch.inference_mode():
        wanted, found = op.reference(**arguments), op.cpu_function(**mine)
    written = [op.written(arguments), op.written(mine)]
    for (path, a), (_, b) in zip(
        leaves([wanted, written[0]]), leaves([found, written[1]]), strict=True
    ):
        assert same_bits(a, b), (op.name, path)


@pytest.mark.parametrize("name", VARIANTS)
def test_cases(name: str) -> None:
    """More rows than a tile has go to the reference anyway; empty inputs never arrive."""
    for case in filter(lambda case: case.small, VARIANTS[name].cases()):
        arguments = build(case)
        if 0 < num_rows(name, arguments) <= ROW_TILE:
            check(VARIANTS[name], arguments)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_mixing(rows: int, dtype: torch.dtype) -> None:
    case = next(iter(OPS["mhc_boundary"].cases()))
    site = build(case)["site"]
    streams, y = random(rows, 4, 64).to(dtype) * 20, random(rows, 64).to(dtype)
    update = Update(y, random(rows, 4).sigmoid(), random(rows, 4, 4).softmax(1))
    check(OPS["mhc_boundary"], {"streams": streams, "update": update, "site": site})
    check(OPS["mhc_pre"], {"streams": streams, "site": site})


@pytest.mark.parametrize("width", ["a16", "a8", "a4"])
@pytest.mark.parametrize("rows", ROWS)
def test_products(rows: int, width: Activations) -> None:
    """Ranges of K, rounded inputs, few columns, several matrices."""
    x = random(rows, 96).bfloat16()
    ranges = UnpackedTensor(random(40, 96), activations=width, k_ranges=3)
    weights = [ranges, random(3, 96), UnpackedTensor(random(24, 96), activations=width)]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    check(OPS["linear"], {"x": x, "weights": weights, "out_dtypes": dtypes})
    groups = UnpackedTensor(random(48, 32), activations=width)
    check(OPS["grouped_linear"], {"x": x.view(rows, 3, 32), "weight": groups})


@pytest.mark.parametrize("width", ["a16", "a8"])
@pytest.mark.parametrize("rows", ROWS)
def test_experts(rows: int, width: Activations) -> None:
    """Rows that share an expert, and a padding row."""
    experts = torch.stack([torch.tensor([row % 3, 3 + row % 2]) for row in range(rows)])
    experts[-1] = -1 if rows > 2 else experts[-1]
    matrices = {
        "w13": random(5, 128, 96) * 0.2,
        "w2": random(5, 96, 64) * 0.2,
        "shared_w13": random(128, 96) * 0.2,
        "shared_w2": random(96, 64) * 0.2,
    }
    given = {name: UnpackedTensor(w, activations=width) for name, w in matrices.items()}
    by = Experts(**given, limit=1.5)
    weights = random(rows, 2).sigmoid()
    x = random(rows, 96).bfloat16()
    arguments = {"x": x, "experts": experts, "weights": weights, "by": by}
    found = [run(**arguments) for run in (OPS["experts"].reference, OPS["experts"].cpu_function)]
    real = experts[:, 0] >= 0  # the result of a padding row is undefined
    assert same_bits(found[0][real], found[1][real])


UNUSUAL = (math.nan, math.inf, -math.inf, 1e4, 0.0)


def check_unusual(op: AnyOp, arguments: dict[str, Any]) -> None:
    """Of eight rows the first hold UNUSUAL: no numbers but NaN where the row is not finite, those
    of the others as ever, and zeros for zeros; by the reference and by the CPU's variant."""
    x = arguments["x"]
    unusual = x.clone()
    for row, value in enumerate(UNUSUAL):
        unusual[row, ..., slice(None) if math.isfinite(value) else 5] = value
    for run in (op.reference, op.cpu_function):
        assert run is not None
        pairs = [list(leaves(run(**{**arguments, "x": rows}))) for rows in (x, unusual)]
        for (path, usual), (_, found) in zip(*pairs, strict=True):
            assert found[:3].isnan().all(), path
            assert found[3].isfinite().all(), path
            assert found[3].any(), path
            assert not found[4].any(), path
            assert same_bits(found[5:], usual[5:]), path


@pytest.mark.parametrize("width", ["a8", "a4"])
def test_rows_with_nan_infinities_large_numbers_and_zeros(width: Activations) -> None:
    x = random(8, 288).bfloat16()
    weights = [
        UnpackedTensor(random(n, 288), activations=width, k_ranges=n // 20) for n in (20, 40)
    ]
    dtypes = [torch.bfloat16, torch.float32]
    check_unusual(OPS["linear"], {"x": x, "weights": weights, "out_dtypes": dtypes})
    groups = UnpackedTensor(random(48, 96), activations=width)
    check_unusual(OPS["grouped_linear"], {"x": x.view(8, 3, 96), "weight": groups})
    sizes = {"w13": (5, 128, 288), "w2": (5, 288, 64)}
    sizes |= {"shared_w13": (128, 288), "shared_w2": (288, 64)}
    given = {n: UnpackedTensor(random(*s) * 0.1, activations=width) for n, s in sizes.items()}
    experts = torch.stack([torch.tensor([row % 3, 3 + row % 2]) for row in range(8)])
    by = {"experts": experts, "weights": random(8, 2).sigmoid(), "by": Experts(**given, limit=1.5)}
    check_unusual(OPS["experts"], {"x": x, **by})


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressor_over_steps(ratio: int) -> None:
    """From the first token on, one row a step, then several of one sequence: blocks that close,
    with and without one before them."""
    op = OPS["compress"]
    case = next(case for case in op.cases() if case.name.startswith(f"ratio {ratio} kv fp32"))
    block = build(case)["block"]
    width, device = block.ape.shape[1], torch.device("cpu")
    shape = 2, state_rows(ratio), width
    starts = [*range(9)] if ratio == 4 else [126, 127, 128]
    block = replace(
        block,
        table=torch.tensor([[3, 1], [0, 2]])[:, : block.table.shape[1]],
        pool=copied(block.pool, lambda part: part.repeat(9, 1, 1)),
        state=CompressorState(random(*shape), random(*shape, seed=1)),
    )
    for first in starts:
        for begins, new in (([first, first + 2], [1, 1]), ([first, first + 1], [3, 2])):
            batch = make_ragged(begins, new, [1, 0], device)
            values = random(sum(new), width, seed=first)
            gates = random(sum(new), width, seed=first + 9) * 3
            block = replace(block, batch=batch, values=values, gates=gates)
            check(op, copied({"block": block}))
            op.reference(block=block)


@pytest.mark.parametrize("has_filters", [False, True])
def test_draws(has_filters: bool) -> None:
    """Of rows with and without randomness, flat and steep ones, with and without filters."""
    for seed, scale in enumerate((0.1, 3.0, 30.0, 300.0)):
        whole = torch.Generator().manual_seed(seed)
        rows, size = 1 + 2 * seed, 700 + seed

        def ints(high: int, generator: torch.Generator = whole, rows: int = rows) -> torch.Tensor:
            return torch.randint(0, high, (rows,), generator=generator)

        inputs = SampleInputs(
            temperature=ints(3) * 0.7,
            top_k=ints(9) * has_filters,
            top_p=torch.full((rows,), 0.8 if has_filters else 1.0),
            min_p=torch.full((rows,), 0.01 * has_filters),
            **dict.fromkeys(("repetition", "presence", "frequency"), torch.ones(rows)),
            seeds=ints(2**62) * 2 - 2**62,
            positions=ints(10**6),
            slots=ints(9),
            flags=torch.zeros(rows, dtype=torch.int64),
            **dict.fromkeys(("seen", "bias", "mask")),
        )
        logits = random(rows, size) * scale
        check(OPS["sample"], {"logits": logits, "inputs": inputs})


@pytest.mark.parametrize("name", VARIANTS)
def test_signatures(name: str) -> None:
    wanted = inspect.signature(VARIANTS[name].reference)
    assert inspect.signature(VARIANTS[name].cpu_function) == wanted


def test_fusions_have_the_bits_of_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a few answers at once, with drafts: results and what is written in place."""
    seen: Counter[str] = Counter()

    def call(fusion: Fusion[..., Any], *args: Any) -> Any:
        mine = copied(args)
        found = fusion.cpu_function(*mine) if fusion.cpu_function is not None else None
        wanted = fusion.one_by_one(*args)
        if found is not None:
            name = fusion.one_by_one.__name__
            seen[name] += 1
            pairs = zip(leaves([wanted, args]), leaves([found, mine]), strict=True)
            assert all(same_bits(a, b) for (_, a), (_, b) in pairs), name
        return wanted

    settings = {"max_context": 256, "max_sequences": 3, "draft": "mtp", "draft_tokens": 1}
    engine = Engine.load("tiny", device="cpu", **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(Fusion, "__call__", call)
    prompts = ["Who are you?", "What is 3 + 4?", "Hi"]
    engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
    assert set(seen) == {"router_experts", "norm_store", "query_attention"}
    assert min(seen.values()) >= 18  # layers of three steps
