"""The state kernels in Triton's interpreter against their references, without a GPU.

The interpreter is chosen when a kernel's module is imported, so each group of checks runs in its
own process: this file is both the test and the program it starts.
"""

import importlib
import math
import sys
from dataclasses import replace

import pytest
import torch

from tests.ops.kernels.compiling import interpreted

GROUPS: dict[str, tuple[str, ...]] = {
    "mhc": ("mhc_pre", "mhc_boundary", "mhc_head", "rms_norm", "mhc variants"),
    "kv": (
        "kv_store",
        "compress",
        "query_prepare",
        "index_query",
        "compress variants",
        "rope",
        "far",
    ),
    "steps": ("begin_step", "draft_rows", "verify", "padding"),
    "fused": ("state prepare", "queries", "moe", "attention with queries"),
    "attention": ("attention", "attention variants", "unpack"),
    "index": ("index_scores", "index_select", "select levels", "shared scores"),
    "sample": ("sample", "sample edges", "accept"),
}
# the same work in another format, too slow to repeat here; the GPU tests run them
SLOW = ("fp32 [0]+[70]", "fp8 [0]+[70]", "fp32 [255, 0]+[2, 40]")


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_match_references(group: str) -> None:
    interpreted("tests.ops.kernels.test_state_interpreter", *GROUPS[group])


def compare(
    label: str, wanted: torch.Tensor, found: torch.Tensor, atol: float, rtol: float
) -> None:
    """Bytes exactly, numbers within the case's tolerance, -inf and NaN in the same places."""
    assert wanted.shape == found.shape, f"{label}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    assert wanted.dtype == found.dtype, f"{label}: {found.dtype}, not {wanted.dtype}"
    if wanted.dtype in (torch.uint8, torch.float8_e4m3fn, torch.int64):
        different = int((wanted.view(torch.uint8) != found.view(torch.uint8)).sum())
        assert different == 0, f"{label}: {different} bytes differ of {wanted.nbytes}"
        return
    a, b = wanted.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs() - rtol * a.abs())
    assert bool((error <= atol).all()), f"{label}: off by {float(error.nan_to_num(9e9).max())}"


def kernel_module(name: str):  # type: ignore[no-untyped-def]
    from dsv4.ops import OPS

    return importlib.import_module(OPS[name].kernels[0].module)


def check_cases(name: str) -> None:
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import copied, leaves

    op, module = OPS[name], kernel_module(name)
    for case in op.cases():
        arguments = case.build(torch.Generator().manual_seed(1))
        if any(t.numel() == 0 for _, t in leaves(arguments)):
            check_empty(op, case.name, arguments)
            continue
        if not case.small:
            continue
        if case.name.startswith(SLOW) or "few bits" in case.name:
            continue  # few bits: test_blackwell_interpreter
        mine = copied(arguments)
        assert module.supports(**mine) is None, f"{name} {case.name}: {module.supports(**mine)}"
        wanted, found = op.reference(**arguments), module.run(**mine)
        if name == "index_scores":
            wanted, found = cut_hidden(wanted, found)
        expected = dict(leaves({"out": wanted, **op.written(arguments)}))
        results = dict(leaves({"out": found, **op.written(mine)}))
        for path, value in expected.items():
            compare(f"{name} {case.name} {path}", value, results[path], case.atol, case.rtol)


def check_empty(op, case: str, arguments) -> None:  # type: ignore[no-untyped-def]
    """No rows in, results of the right shape out, by reference and kernel."""
    from dsv4.ops.core.arguments import copied, leaves
    from dsv4.ops.core.context import kernels_on_cpu
    from tests.ops.test_references import PUBLIC

    with kernels_on_cpu():
        found = PUBLIC[op.name](**copied(arguments))
    wanted = PUBLIC[op.name](**arguments)
    pairs = zip(leaves({"out": wanted}), leaves({"out": found}), strict=True)
    for (path, a), (_, b) in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{op.name} {case} {path}"


def cut_hidden(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both to the smaller width; columns beyond it are -inf."""
    width = min(a.shape[1], b.shape[1])
    for scores in (a, b):
        assert bool((scores[:, width:] == float("-inf")).all())
    return a[:, :width], b[:, :width]


def check_mhc_variants() -> None:
    """A program per chunk and a program per group give the same bits; so do few and many rows."""
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import same_bits

    module = kernel_module("mhc_boundary")
    case = next(c for c in OPS["mhc_boundary"].cases() if "bfloat16" in c.name)
    arguments = case.build(torch.Generator().manual_seed(2))
    few = module.run(**arguments)
    chosen = module.choose_config
    module.choose_config = lambda *_: module.MixConfig(32, False, 4, 1)
    many = module.run(**arguments)
    module.choose_config = chosen
    assert all(same_bits(a, b) for a, b in zip(few, many, strict=True))
    again = torch.arange(70) % few[0].shape[0]
    many = module.run(**mhc_rows(arguments, again))
    assert all(same_bits(a[again], b) for a, b in zip(few, many, strict=True))


def mhc_rows(arguments, rows):  # type: ignore[no-untyped-def]
    from dsv4.ops.core.arguments import copied

    update = copied(arguments["update"], lambda tensor: tensor[rows])
    return {**arguments, "streams": arguments["streams"][rows], "update": update}


def check_compress_variants() -> None:
    """A chunk at once, and its tokens one by one, leave the same state and the same entries."""
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import copied, leaves, same_bits
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.kv.compress import compress_reference

    module = kernel_module("compress")
    names = ("ratio 4 kv fp8 [6, 2]", "ratio 4 index fp4")
    for case in OPS["compress"].cases():
        if not case.name.startswith(names):
            continue
        whole = case.build(torch.Generator().manual_seed(3))["block"]
        single, wanted = copied(whole), copied(whole)
        batch = whole.batch
        module.run(whole)
        compress_reference(wanted)
        for row in range(batch.num_tokens):
            seq = int(batch.seq_idx[row])
            one = make_ragged(
                [int(batch.positions[row])], [1], [int(batch.slots[seq])], torch.device("cpu")
            )
            part = {name: getattr(single, name)[row : row + 1] for name in ("values", "gates")}
            module.run(replace(single, **part, batch=one, table=single.table[seq : seq + 1]))
        for name in ("state", "pool"):
            pairs = zip(leaves(getattr(whole, name)), leaves(getattr(single, name)), strict=True)
            assert all(same_bits(a, b) for (_, a), (_, b) in pairs), case.name


def check_state_prepare() -> None:
    """One launch leaves the same bits as the ops one by one, with and without compressors."""
    for is_few in (False, True):
        check_state_of(is_few)


def drafts_batch():  # type: ignore[no-untyped-def]
    """Eight rows that close two blocks, three that close one of 128, and two of padding."""
    from dsv4.ops.core.ragged import Ragged, make_ragged

    batch = make_ragged([13, 125], [8, 3], [1, 0], torch.device("cpu"))
    nothing = torch.full((2,), -1)
    return Ragged(
        torch.cat((batch.positions, nothing)), torch.cat((batch.seq_idx, nothing + 2)),
        batch.first_rows, batch.starts, batch.ends, batch.slots, is_padded=True, is_few=True,
    )  # fmt: skip


def check_state_of(is_few: bool) -> None:
    """Few rows of drafts, against the ops that take prompts of any length."""
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import copied, leaves, same_bits
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.kv.rope import rope_frequencies

    fused = importlib.import_module("dsv4.ops.fused.norm_store_triton")
    generator = torch.Generator().manual_seed(6)
    batch = make_ragged([6, 127], [1, 1], [1, 0], torch.device("cpu"))
    if is_few:
        batch = drafts_batch()
    rows = batch.num_tokens
    frequencies = rope_frequencies(16, 10000.0)
    key = case_arguments("kv_store", "fp8 [0, 4096]+[1, 1]", generator)
    kv = torch.randn(rows, key["key"].kv.shape[1], generator=generator).bfloat16()
    key = replace(key["key"], batch=batch, frequencies=frequencies, kv=kv)
    norm = {"x": torch.randn(rows, 96, generator=generator).bfloat16(), "eps": 1e-6}
    norm["weight"] = torch.rand(96, generator=generator)
    for ratio in (0, 4, 128):
        blocks = []
        for is_index in (False, True)[: {0: 0, 4: 2, 128: 1}[ratio]]:
            blocks.append(compress_arguments(ratio, is_index, batch, frequencies, generator))
        if len(blocks) == 2:
            blocks[1] = replace(blocks[1], table=blocks[0].table)
        mine = copied({"key": key, "blocks": blocks})
        # one table, as the model has
        mine["blocks"] = [replace(b, table=mine["blocks"][0].table) for b in mine["blocks"]]
        given = (norm["x"], norm["weight"], mine["key"], mine["blocks"])
        assert fused.supports(*given) is None, fused.supports(*given)
        out = fused.run(*given)
        alone = kernel_module("rms_norm").run(**norm)
        kernel_module("kv_store").run(key)
        for block in blocks:
            alike = replace(block, batch=replace(batch, is_few=False))
            kernel_module("compress").run(alike)
        assert same_bits(out, alone)
        for path, value in leaves({"key": key.pool, "blocks": blocks}):
            found = dict(leaves({"key": mine["key"].pool, "blocks": mine["blocks"]}))[path]
            assert same_bits(value, found), f"ratio {ratio} {path}"
    two = replace(key, batch=make_ragged([0], [2], [0], batch.device))
    assert fused.supports(norm["x"], norm["weight"], two, [])
    assert OPS["kv_store"].mutates == ("key.pool",)


def case_arguments(name: str, beginning: str, generator: torch.Generator):  # type: ignore[no-untyped-def]
    from dsv4.ops import OPS

    case = next(c for c in OPS[name].cases() if c.name.startswith(beginning))
    return case.build(generator)


def compress_arguments(ratio, is_index, batch, frequencies, generator):  # type: ignore[no-untyped-def]
    from dsv4.formats.entry import index_entry, kv_entry
    from dsv4.ops.kv.compress import Compression, CompressorState, state_rows
    from dsv4.ops.kv.pool import allocate_pool

    dim = 64 if is_index else 512
    width = 2 * dim if ratio == 4 else dim
    parts = index_entry("fp4", dim) if is_index else kv_entry("fp8", dim, 16)
    state = (2, state_rows(ratio), width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Compression(
        values=normal(batch.num_tokens, width), gates=normal(batch.num_tokens, width),
        ape=normal(ratio, width),
        norm=torch.rand(dim, generator=generator), frequencies=frequencies, eps=1e-6,
        ratio=ratio, dtype=torch.bfloat16,
        state=CompressorState(normal(*state), normal(*state)), batch=batch,
        pool=allocate_pool("fp4" if is_index else "fp8", is_index, parts, (10, 8), "cpu"),
        table=torch.arange(10).view(2, 5),
    )  # fmt: skip


def check_queries() -> None:
    from dsv4.ops.attention.query import Queries
    from dsv4.ops.core.arguments import same_bits
    from dsv4.ops.kv.rope import rope_frequencies

    fused = importlib.import_module("dsv4.ops.fused.query_and_index_triton")
    module = kernel_module("query_prepare")
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    shared = {"positions": torch.tensor([5, 70000]), "frequencies": rope_frequencies(16, 10000.0)}
    query = {"q": normal(2, 20, 48), **shared, "eps": 1e-6}
    index = {"q": normal(2, 18, 32), **shared, "index_format": "fp4"}
    weights = normal(2, 18).float()
    given = (Queries(query["q"], 1e-6), index["q"], weights, 0.3, *shared.values(), "fp4")
    assert fused.supports(*given) is None
    queries, *found = fused.run(*given)
    assert queries.is_prepared
    wanted = module.run(**query), module.run(**index), weights * 0.3
    assert all(same_bits(a, b) for a, b in zip(wanted, (queries.q, *found), strict=True))


def check_moe() -> None:
    """Experts that programs choose themselves: the bits of router and experts one by one."""
    from dsv4.ops.core.arguments import same_bits

    fused = importlib.import_module("dsv4.ops.fused.router_experts_triton")
    for hashed in (False, True):
        generator = torch.Generator().manual_seed(8)
        experts = case_arguments("experts", "1x160", generator)
        choice = case_arguments("router", f"3x1040 6 of 48 hashed {hashed}", generator)
        x = experts["x"]
        gate, by = choice["by"], experts["by"]
        gate = replace(gate, gate=gate.gate[:8, :160].contiguous(), num_chosen=2)
        if hashed:
            gate = replace(gate, table=torch.tensor([[0, 1]] * 3 + [[6, 2]]))
        else:
            gate = replace(gate, bias=gate.bias[:8].contiguous())
        given = (x, torch.tensor([3]), gate, by)
        assert fused.supports(*given) is None, fused.supports(*given)
        found = fused.run(*given).total()
        picked, weights = kernel_module("router").run(*given[:3])
        wanted = kernel_module("experts").run(x, picked, weights, by)
        assert same_bits(found, wanted), hashed


def check_attention_variants() -> None:
    """Tiles in parallel and one after another, 16 and 32 heads a program, weights before values:
    the same bits, with pieces one by one and with joined ones (whether both agree only a GPU can
    say)."""
    from dsv4.ops.attention.attention import Compressed, Visible, _filled, attention_reference
    from dsv4.ops.core.arguments import same_bits
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.kv.rope import rope_frequencies

    module = kernel_module("attention")
    generator = torch.Generator().manual_seed(4)
    batch = make_ragged([1700, 40], [2, 1], [0, 1], torch.device("cpu"))
    rows = []
    for position in batch.positions.tolist():
        kept = torch.randperm((position + 1) // 4, generator=generator)[:400].sort().values
        rows.append(torch.nn.functional.pad(kept, (0, 400 - kept.numel()), value=-1))
    for dim, channels, heads in ((48, 64, 20), (32, 32, 32)):  # of 48 nothing can be joined
        entries = _filled(generator, "fp8", dim, 2 * 54, 8)
        table = torch.randperm(2 * 54, generator=generator).view(2, 54)
        q = torch.randn(3, heads, dim, generator=generator).bfloat16()
        to = Visible(
            sink=torch.randn(heads, generator=generator),
            pool=_filled(generator, "fp8", dim, 2 * 20, 8),
            table=torch.randperm(2 * 20, generator=generator).view(2, 20),
            compressed=Compressed(entries, table, 4, torch.stack(rows)),
            batch=batch,
            window=128,
            frequencies=rope_frequencies(16, 10000.0),
        )
        results = [
            module.run(q, to, config=module.AttentionVariant(heads, split, 4, 1, channels))
            for heads in (16, 32)
            for split in (True, False)
        ]
        if dim == 32:  # all pieces and blocks of heads alike
            two_pass = module.AttentionVariant(16, False, 4, 1, two_pass=True)
            results.append(module.run(q, to, config=two_pass))
            merge = importlib.import_module("dsv4.ops.attention.variants.merge_triton")
            before, merge.SHORT, merge.AHEAD = (merge.SHORT, merge.AHEAD), (), 8  # two turns
            results.append(module.run(q, to, config=module.AttentionVariant(16, True, 4, 1)))
            merge.SHORT, merge.AHEAD = before
        assert all(same_bits(found, results[0]) for found in results[1:])
        compare("attention variants", attention_reference(q, to), results[0], 2e-2, 2e-2)


def check_unpack() -> None:
    """Rows of all entries that the sequences of a step can see; none of another is touched."""
    from dsv4.ops.attention.attention import Compressed, Visible, _filled
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.kv.pool import load, locate
    from dsv4.ops.kv.rope import rope_frequencies

    module = importlib.import_module("dsv4.ops.attention.variants.unpack_triton")
    module.MOST_ROWS = 400
    generator = torch.Generator().manual_seed(6)
    starts, new, window, ratio = [700, 0, 3], [2, 20, 1], 31, 4
    batch = make_ragged(starts, new, [0, 1, 2], torch.device("cpu"))
    for fmt, dim, dtype in (("fp8", 96, torch.float16), ("bf16", 48, torch.bfloat16)):
        pool, table = _filled(generator, fmt, dim, 21, 8), torch.randperm(21).view(3, 7)
        older = _filled(generator, fmt, dim, 9, 8), torch.randperm(9).view(3, 3)
        for compressed in (None, Compressed(*older, ratio, None)):
            frequencies, q = rope_frequencies(16, 10000.0), torch.zeros(0, dtype=torch.bfloat16)
            to = Visible(q, pool, table, compressed, batch, window, frequencies)
            module.workspace(pool.device, f"unpacked_{fmt}", 400 * dim, dtype).fill_(-7)
            rows, recent = module.unpack(q, to)
            assert recent == 23 + 3 * (window - 1)
            rows, seen = rows[: 400 * dim].view(400, dim).float(), torch.zeros(400, dtype=bool)
            for s, (start, count) in enumerate(zip(starts, new, strict=True)):
                begin = max(0, start - window + 1)
                at = sum(new[:s]) + (s + 1) * (window - 1) + begin - start
                wanted = [(pool, table, at, begin, start + count)]
                if compressed is not None:
                    visible = min((start + count) // ratio, 24)
                    wanted.append((*older, recent + 24 * s, 0, visible))
                for source, its_table, at, begin, end in wanted:
                    entry = torch.arange(begin, end)
                    where = locate(its_table, torch.full_like(entry, s), entry, 8)
                    place = at + torch.arange(end - begin)
                    assert torch.equal(rows[place], load(source, *where).float()), (fmt, s)
                    seen[place] = True
            assert (rows[~seen] == -7).all(), fmt


def check_attention_with_queries() -> None:
    """Queries prepared inside attention have the bits of the two ops one by one."""
    from dsv4.ops.attention.attention import Compressed, Visible, _filled
    from dsv4.ops.attention.query import Queries
    from dsv4.ops.core.arguments import same_bits
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.kv.rope import rope_frequencies

    fused = importlib.import_module("dsv4.ops.fused.attention_with_queries_triton")
    generator = torch.Generator().manual_seed(5)
    frequencies = rope_frequencies(16, 10000.0)
    attention = kernel_module("attention")
    for dim, compressed in ((64, False), (64, True), (32, True)):
        q = torch.randn(2, 20, dim, generator=generator).bfloat16() * 3
        batch = make_ragged([700, 40], [1, 1], [0, 1], torch.device("cpu"))
        entries = _filled(generator, "fp8", dim, 2 * 2, 8)
        table = torch.arange(4).view(2, 2)
        to = Visible(
            sink=torch.randn(20, generator=generator),
            pool=_filled(generator, "fp8", dim, 2 * 20, 8),
            table=torch.randperm(2 * 20, generator=generator).view(2, 20),
            compressed=Compressed(entries, table, 128, None) if compressed else None,
            batch=batch,
            window=128,
            frequencies=frequencies,
        )
        given = (Queries(q, 1e-6), to)
        assert fused.supports(*given) is None, fused.supports(*given)
        prepared = kernel_module("query_prepare").run(q, batch.positions, frequencies, 1e-6)
        wanted = attention.run(prepared, to)
        assert same_bits(fused.run(*given), wanted)
        if dim == 32:  # as one matrix
            whole = attention.AttentionVariant(32, True, 4, 1, 32)
            assert same_bits(attention.run(q, to, config=whole, eps=1e-6), wanted)


def check_select_levels() -> None:
    """Rows cut into chunks, with ties across their borders and hidden entries; more candidates
    than the last program holds at a time. Then the same with a program for each row."""
    from dsv4.ops.attention.index import index_select_reference
    from dsv4.ops.attention.variants import prompt_select_triton

    module = kernel_module("index_select")
    module.ONE = module.CHUNK = prompt_select_triton.TILE = 64
    generator = torch.Generator().manual_seed(5)
    scores = (torch.randn(4, 700, generator=generator) * 2).round()
    scores[1, 300:] = float("-inf")
    scores[3, 9:650] = float("-inf")  # whole chunks hidden, and fewer entries than are asked for
    scores[3, 655:] = float("-inf")
    scores[2] = -0.0
    scores[2, 5::7] = 0.0
    peaked = torch.randn(2, 700, generator=generator)
    peaked[:, 100:180] += 9.0  # all of the best in two chunks
    peaked[1, 5::64] = float("inf")  # parts with nothing but ties
    short = scores[:, :60].contiguous()
    for inputs, topk, room in (
        (scores, 17, 64), (scores, 32, 16), (peaked, 100, 4096), (short, 17, 64)
    ):  # fmt: skip
        module.CANDIDATES = room
        wanted = index_select_reference(inputs, topk)
        for module.MANY_ROWS in (5, 2):
            compare(f"levels {topk}", wanted, module.run(inputs, topk), 0.0, 0.0)


def check_shared_scores() -> None:
    """Rows that share their keys, of one sequence and of several: as their reference has them."""
    from dsv4.ops import OPS
    from dsv4.ops.attention.index import index_scores_reference
    from dsv4.ops.core.ragged import make_ragged

    module = kernel_module("index_scores")
    module.SHARING = 1
    batch = make_ragged([300, 0, 90], [7, 33, 2], [0, 1, 2], torch.device("cpu"))
    for fmt in ("fp8", "fp4", "bf16"):
        [case] = [c for c in OPS["index_scores"].cases() if f"{fmt} [400, 90]" in c.name or
                  (fmt == "bf16" and c.name.startswith("bf16"))]  # fmt: skip
        given = case.build(torch.Generator().manual_seed(7))
        heads, _ = given["q"].shape[1:]
        columns = -(-int(batch.ends.max()) // 32) + 1
        pages = given["to"].pool.data.shape[0]
        table = torch.randint(0, pages, (3, columns), generator=torch.Generator().manual_seed(8))
        q = given["q"].bfloat16()[torch.arange(batch.num_tokens) % len(given["q"])]
        weights = torch.randn(batch.num_tokens, heads, generator=torch.Generator().manual_seed(9))
        to = replace(given["to"], batch=batch, table=table, topk=6)
        wanted, found = cut_hidden(
            index_scores_reference(q, weights, to), module.run(q.contiguous(), weights, to)
        )
        assert bool((found == 0).any())
        assert bool((found.isfinite() & (found != 0)).any())
        compare(f"shared {fmt}", wanted, found, 1e-3, 1e-3)


def check_far_positions() -> None:
    """Angles up to a million radians, against fp64."""
    module = kernel_module("index_query")
    positions = torch.tensor([0, 1, 77, 65535, 999_999, 1_048_575])
    frequencies = torch.tensor([1.0, 0.7310585, 0.33333334, 0.01, 1e-4, 1e-6])
    x = torch.zeros(6, 1, 12)
    x[:, :, 0::2] = 1.0
    found = module.run(x, positions, frequencies, index_format="fp32")[:, 0]
    angles = (positions.float().unsqueeze(1) * frequencies).double()
    compare("cos", angles.cos(), found[:, 0::2].double(), 3e-7, 0.0)
    compare("sin", angles.sin(), found[:, 1::2].double(), 3e-7, 0.0)


def check_padding() -> None:
    """Rows and sequences that are not there leave no trace; a boundary inside a chunk is kept."""
    from dataclasses import replace

    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import copied, leaves
    from dsv4.ops.core.ragged import Kept
    from dsv4.ops.kv.compress import CompressorState

    def padded(batch):  # type: ignore[no-untyped-def]
        """Three rows and a sequence more."""
        count = batch.starts.shape[0]

        def more(values, *others):  # type: ignore[no-untyped-def]
            return torch.cat((values, torch.tensor(others)))

        last = batch.ends // 128 * 128  # the last boundary of each sequence
        inside = (last - batch.starts >= 4) & (last < batch.ends)
        return replace(
            batch,
            positions=more(batch.positions, -1, -1, -1),
            seq_idx=more(batch.seq_idx, count, count, count),
            first_rows=more(batch.first_rows, 0),
            starts=more(batch.starts, 0),
            ends=more(batch.ends, 0),
            slots=more(batch.slots, 0),
            keep=Kept(more(torch.where(inside, last, 0), 0), torch.arange(count + 1)),
            is_padded=True,
        )

    def widen(tensor):  # type: ignore[no-untyped-def]
        return torch.cat((tensor, torch.randn(3, *tensor.shape[1:]).to(tensor.dtype)))

    num_kept = 0
    for name in ("kv_store", "compress"):
        op, module = OPS[name], kernel_module(name)
        for case in op.cases():
            ((argument, given),) = case.build(torch.Generator().manual_seed(4)).items()
            batch, table = padded(given.batch), given.table
            given = replace(given, batch=batch, table=torch.cat((table, table[:1] * 0)))
            for wide in ("kv", "values", "gates"):
                if hasattr(given, wide):
                    given = replace(given, **{wide: widen(getattr(given, wide))})
            if name == "compress" and given.ratio == 4:
                state = given.state
                kept = torch.zeros(batch.starts.shape[0], 4, state.values.shape[2] // 2)
                state = CompressorState(state.values, state.gates, kept, kept.clone())
                given = replace(given, state=state)
            arguments = {argument: given}
            mine = copied(arguments)
            op.reference(**arguments)
            module.run(**mine)
            wanted, found = dict(leaves(op.written(arguments))), dict(leaves(op.written(mine)))
            for path, value in wanted.items():
                compare(f"{name} {case.name} {path}", value, found[path], case.atol, case.rtol)
                num_kept += "kept_values" in path and bool((value != 0).any())
    assert num_kept > 0, "no case crosses a boundary"
    check_padded_attention(padded)
    check_padded_experts()


def check_padded_attention(padded) -> None:  # type: ignore[no-untyped-def]
    """Rows that are not there read nothing in front of the pool: NaN lies there."""
    from dsv4.ops import OPS

    for case in OPS["attention"].cases():
        if not case.name.startswith(("bf16", "fp32 [0]+[5]")):
            continue
        q, to = case.build(torch.Generator().manual_seed(4)).values()
        parts = {}
        for name, part in to.pool.parts.items():
            before = torch.full_like(part[:1], float("nan"))
            parts[name] = torch.cat((before, part))[1:]
        pool, table = replace(to.pool, parts=parts), torch.cat((to.table, to.table[:1] * 0))
        compressed = to.compressed
        if compressed is not None:
            compressed = replace(
                compressed,
                table=torch.cat((compressed.table, compressed.table[:1])),
                selected=torch.cat((compressed.selected, compressed.selected[:1].repeat(3, 1))),
            )
        more = torch.cat((q, torch.randn(3, *q.shape[1:]).to(q.dtype)))
        given = replace(to, batch=padded(to.batch), pool=pool, table=table, compressed=compressed)
        found = kernel_module("attention").run(more, given)
        assert bool(found.isfinite().all()), f"{case.name}: padding read before the pool"


def check_padded_experts() -> None:
    from dsv4.ops import OPS

    router, experts = kernel_module("router"), kernel_module("experts")
    for case in OPS["router"].cases():
        arguments = case.build(torch.Generator().manual_seed(4))
        if arguments["x"].dtype != torch.bfloat16:
            continue
        chosen, _ = OPS["router"].reference(**arguments)
        arguments["token_ids"][1] = -1
        chosen[1] = -1
        compare(f"router {case.name}", chosen, router.run(**arguments)[0], 0.0, 0.0)
    case = next(c for c in OPS["experts"].cases() if c.name.startswith("5x128"))
    arguments = case.build(torch.Generator().manual_seed(4))
    wanted = experts.run(**arguments)
    some = [0, 2, 4]
    arguments["experts"][[1, 3]] = -1
    for few in (True, False):  # both ways to sort pairs by expert
        module = importlib.import_module("dsv4.ops.moe.group_by_expert_triton")
        module.SMALL_PAIRS = 1024 if few else 0
        found = experts.run(**arguments)
        compare("experts", wanted[some], found[some], 0.0, 0.0)
        OPS["experts"].reference(**arguments)


def check_sample_edges() -> None:
    """Filters that keep one token, all tokens, and part of a tie; rows of different kinds."""
    from dataclasses import replace

    from dsv4.ops import OPS
    from dsv4.ops.sample.sample import sample_reference

    module = kernel_module("sample")
    case = next(c for c in OPS["sample"].cases() if "temperature 0.8" in c.name)
    arguments = case.build(torch.Generator().manual_seed(7))
    inputs = replace(
        arguments["inputs"],
        temperature=torch.tensor([0.7, 0.0, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([1, 3, 0, 7, 0]),
        top_p=torch.tensor([0.5, 0.1, 1.0, 0.63, 0.0]),
        min_p=torch.tensor([0.0, 0.5, 0.0, 0.0, 0.2]),
        flags=torch.tensor([0, 1, 2, 4, 0]),
    )
    logits = arguments["logits"].round()
    wanted = sample_reference(logits, inputs)
    # without places for some candidates there are more; without any the whole row is searched
    for few, some, room in ((256, 512, 512), (4, 512, 512), (4, 4, 512), (4, 4, 4)):
        module.FEW_CANDIDATES, module.SOME_CANDIDATES, module.CANDIDATES = few, some, room
        found = module.run(logits, inputs)
        compare("tokens", wanted[0], found[0], 0.0, 0.0)
        compare("norms", wanted[1], found[1], 1e-4, 1e-4)
    check_sample_nan(logits, inputs)


def check_sample_nan(logits, inputs) -> None:  # type: ignore[no-untyped-def]
    """NaN or infinities in a row: no token, or some whose log-probability says so once accepted."""
    from dsv4.ops.sample.accept import Sampled

    rows, size = logits.shape
    bad = logits.clone()
    bad[0, 3], bad[1], bad[2], bad[3, 250] = math.nan, math.nan, -math.inf, math.inf
    sampled = []
    for given in (logits, bad):
        tokens, norms = kernel_module("sample").run(given, inputs)
        assert ((tokens == -1) == ~norms.isfinite()).all()
        slots, numbers = inputs.slots.max() + 1, (torch.zeros(rows), torch.zeros(rows))
        ids = torch.zeros(slots, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        target = Sampled(*ids, *numbers, inputs.seen.clone())
        kernel_module("accept").run(tokens, given, norms, inputs.slots, inputs.flags, target)
        sampled.append(target)
    plain, found = sampled
    assert not found.chosen[:4].isfinite().any(), found.chosen
    assert ((found.tokens >= 0) & (found.tokens < size)).all()
    assert torch.equal(found.tokens[4:], plain.tokens[4:])
    assert torch.equal(found.chosen[4:], plain.chosen[4:])
    assert torch.equal(found.newest[inputs.slots], found.tokens)


def fill_with_nan() -> None:
    """What a kernel forgets to write must not look plausible."""

    def filled(make):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            out = make(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else -77)

        return call

    torch.empty, torch.empty_like = filled(torch.empty), filled(torch.empty_like)


EXTRA = {
    "mhc variants": check_mhc_variants,
    "compress variants": check_compress_variants,
    "state prepare": check_state_prepare,
    "queries": check_queries,
    "moe": check_moe,
    "attention variants": check_attention_variants,
    "unpack": check_unpack,
    "attention with queries": check_attention_with_queries,
    "select levels": check_select_levels,
    "shared scores": check_shared_scores,
    "far": check_far_positions,
    "sample edges": check_sample_edges,
    "padding": check_padding,
}


def main(names: list[str]) -> None:
    import tests.ops.kernels.shim  # noqa: F401 - repairs the interpreter

    fill_with_nan()
    for name in names:
        if name in EXTRA:
            EXTRA[name]()
        else:
            check_cases(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
