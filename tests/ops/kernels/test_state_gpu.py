"""The state kernels on a GPU: all cases, model sizes, and rows that never depend on the batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import state_ops as inputs
from dsv4.ops import OPS
from dsv4.ops.attention.attention import Visible, _filled
from dsv4.ops.attention.query import Queries
from dsv4.ops.core.arguments import copied, leaves, same_bits
from dsv4.ops.core.op import Arguments
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.kv.rope import rope_frequencies
from dsv4.tools.bench_ops import SHAPES
from tests.ops.kernels.test_state_interpreter import compare, cut_hidden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NAMES = (
    "rms_norm", "mhc_pre", "mhc_boundary", "mhc_head", "rope", "query_prepare", "index_query",
    "kv_store", "compress", "index_scores", "index_select", "attention", "sample", "accept",
    "draft_rows", "verify",
)  # fmt: skip
FLASH, PRO = SHAPES["flash"], SHAPES["pro"]
BATCHES = (1, 2, 3, 8, 9, 17, 64, 65, 128, 257, 1000, 8192)


def module_of(name: str) -> Any:
    return import_module(OPS[name].kernels[0].module)


def on(device: str, value: Any) -> Any:
    return copied(value, lambda tensor: tensor.to(device))


def run_both(name: str, arguments: Arguments) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference on the CPU and the kernel on the GPU: results and what they wrote."""
    op = OPS[name]
    here, there = on("cpu", arguments), on("cuda", arguments)
    reason = module_of(name).supports(**there)
    assert reason is None, f"{name}: {reason}"
    wanted, found = op.reference(**here), on("cpu", module_of(name).run(**there))
    if name == "index_scores":
        wanted, found = cut_hidden(wanted, found)
    expected = dict(leaves({"out": wanted, **op.written(here)}))
    return expected, dict(leaves({"out": found, **on("cpu", op.written(there))}))


def compare_loosely(label: str, wanted: Tensor, found: Tensor, atol: float, rtol: float) -> None:
    """As `compare`, but of rounded codes one in a thousand may be the neighbour."""
    if wanted.dtype in (torch.uint8, torch.float8_e4m3fn):
        different = (wanted.view(torch.uint8) != found.view(torch.uint8)).float().mean()
        assert float(different) <= 1e-3, f"{label}: {float(different):.2%} of the bytes differ"
        return
    compare(label, wanted, found, atol, rtol)


@pytest.mark.parametrize("name", NAMES)
def test_cases(name: str) -> None:
    for case in OPS[name].cases():
        arguments = case.build(torch.Generator().manual_seed(1))
        if any(t.numel() == 0 for _, t in leaves(arguments)) or "few bits" in case.name:
            continue  # few bits: kernels for another GPU
        wanted, found = run_both(name, arguments)
        for path, value in wanted.items():
            label = f"{name} {case.name} {path}"
            compare_loosely(label, value, found[path], case.atol, case.rtol)


def model_cases() -> Iterator[tuple[str, str, Callable[[], Arguments], float]]:
    """(op, label, arguments on the CPU, tolerance)"""
    cpu = "cpu"
    for shape in (FLASH, PRO):
        tag, topk = shape.name, inputs.TOPK[shape.name]
        for t in (1, 3, 70):
            yield (
                "mhc_boundary",
                f"{tag} {t}",
                lambda s=shape, t=t: inputs.mhc_arguments(s, t, cpu),
                3e-2,
            )
        yield "mhc_head", tag, lambda s=shape: inputs.mhc_arguments(s, 2, cpu, head=True), 3e-2
        for starts, new in (([9000, 100], [1, 1]), ([3], [150])):
            ragged = make_ragged(starts, new, list(range(len(starts))), torch.device(cpu))
            yield (
                "attention",
                f"{tag} csa {starts}",
                lambda s=shape, b=ragged, k=topk: inputs.attention_arguments(s, b, 4, k, cpu, 400),
                2e-2,
            )
            yield (
                "attention",
                f"{tag} hca {starts}",
                lambda s=shape, b=ragged: inputs.attention_arguments(s, b, 128, 0, cpu, 400),
                2e-2,
            )
            yield (
                "attention",
                f"{tag} swa {starts}",
                lambda s=shape, b=ragged: inputs.attention_arguments(s, b, 0, 0, cpu, 400),
                2e-2,
            )
            yield (
                "query_prepare",
                f"{tag} {starts}",
                lambda s=shape, b=ragged: inputs.query_arguments(s, b, cpu),
                2e-2,
            )
    for starts, new in (([9000, 100, 131], [1, 1, 1]), ([126], [150]), ([5, 7], [2, 6])):
        ragged = make_ragged(starts, new, list(range(len(starts))), torch.device(cpu))
        label = f"{starts}+{new}"
        yield "kv_store", label, lambda b=ragged: distinct(inputs.kv_arguments(b, cpu)), 2e-2
        yield (
            "index_query",
            label,
            lambda b=ragged: inputs.query_arguments(FLASH, b, cpu, True),
            2e-2,
        )
        for ratio, index in ((4, False), (4, True), (128, False)):
            yield (
                "compress",
                f"{ratio} {index} {label}",
                lambda b=ragged, r=ratio, i=index: distinct(
                    inputs.compress_arguments(b, r, i, cpu)
                ),
                2e-2,
            )
        yield "index_scores", label, lambda b=ragged: inputs.scores_arguments(b, 16, cpu, 64), 2e-3
    for width, topk in ((4096, 512), (32768, 512), (262144, 1024)):
        for ties in (False, True):
            yield (
                "index_select",
                f"{width} {topk} {ties}",
                lambda w=width, k=topk, t=ties: scores_row(w, k, t),
                0.0,
            )
    for filtered in (False, True):
        yield (
            "sample",
            f"{filtered}",
            lambda f=filtered: inputs.sample_arguments(3, cpu, 129280, f),
            1e-3,
        )


def distinct(arguments: Arguments) -> Arguments:
    """A page table without repeated pages, where entries are written."""
    ((name, given),) = arguments.items()
    pages = torch.randperm(given.pool.data.shape[0], device=given.table.device)
    return {name: replace(given, table=pages[: given.table.numel()].view(given.table.shape))}


def scores_row(width: int, topk: int, ties: bool) -> Arguments:
    scores = torch.randn(2, width, generator=torch.Generator().manual_seed(width))
    scores[1, width // 3 :] = float("-inf")
    return {"scores": (scores * 3).round() if ties else scores, "topk": topk}


def test_model_sizes() -> None:
    for name, label, build, tolerance in model_cases():
        torch.manual_seed(8)
        wanted, found = run_both(name, build())
        for path, value in wanted.items():
            compare_loosely(f"{name} {label} {path}", value, found[path], tolerance, tolerance)


def outputs(name: str, arguments: Arguments) -> list[Tensor]:
    found = module_of(name).run(**arguments)
    return [tensor for _, tensor in leaves({"out": found})]


def first_rows(value: Any, rows: int, total: int) -> Any:
    """Every tensor with one row per token cut to its first rows."""
    return copied(value, lambda t: t[:rows].contiguous() if t.shape[:1] == (total,) else t)


@pytest.mark.parametrize("name", ["rms_norm", "mhc_boundary", "mhc_head", "index_select", "sample"])
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    torch.manual_seed(9)
    total = {"sample": 64, "index_select": 1000}.get(name, BATCHES[-1])
    if name == "rms_norm":
        x = torch.randn(total, 4096, device="cuda").bfloat16()
        arguments: Arguments = {"x": x, "weight": torch.randn(4096, device="cuda"), "eps": 1e-6}
    elif name == "index_select":
        arguments = {"scores": torch.randn(total, 20000, device="cuda"), "topk": 512}
    elif name == "sample":
        arguments = inputs.sample_arguments(total, "cuda", 129280, True)
    else:
        arguments = inputs.mhc_arguments(FLASH, total, "cuda", head=name == "mhc_head")
    whole = outputs(name, arguments)
    site = {"site": arguments["site"]} if "site" in arguments else {}
    for rows in BATCHES:
        if rows < total:
            part = outputs(name, {**first_rows(arguments, rows, total), **site})
            assert all(same_bits(a, b[:rows]) for a, b in zip(part, whole, strict=True)), rows


@pytest.mark.parametrize("tokens", [1025, 3001])
@pytest.mark.parametrize("shape", [FLASH, PRO], ids=lambda s: s.name)
def test_prompts_update_streams_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, shape: Any, tokens: int
) -> None:
    """The kernel for prompts on sm_90, in a ring whose stages are used again and again."""
    module = module_of("mhc_boundary")
    arguments = inputs.mhc_arguments(shape, tokens, "cuda")
    arguments["streams"][5, 2, 77] = float("nan")
    arguments["update"].y[6] *= 1e4
    monkeypatch.setattr(module, "on_hopper", lambda device: False)
    wanted = module.run(**arguments)
    monkeypatch.undo()
    for _ in range(5):
        found = module.run(**arguments)
        assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("shape", [FLASH, PRO], ids=lambda s: s.name)
def test_attention_has_the_same_bits_in_every_form(shape: Any, kind: str) -> None:
    """Tiles in parallel or in a row, 16 or 64 heads a program, weights before values, entries
    unpacked first, 1 query or many."""
    torch.manual_seed(10)
    module = module_of("attention")
    ratio, topk = {"swa": (0, 0), "csa": (4, inputs.TOPK[shape.name]), "hca": (128, 0)}[kind]
    batch = make_ragged([90000, 700], [5, 1995], [0, 1], torch.device("cuda"))
    arguments = inputs.attention_arguments(shape, batch, ratio, topk, "cuda")
    whole = module.run(**arguments)
    configs = [
        module.AttentionVariant(*c)
        for c in ((64, False, 8, 2), (16, True, 8, 1), (16, False, 4, 2))
    ]
    configs.append(module.AttentionVariant(64, True, 8, 1, 512))
    for config in (*configs, module.TWO_PASS, module.UNPACKED):
        found = module.run(**arguments, config=config)
        assert same_bits(found, whole), config
    for row in (0, 4, 5, 304, 1999):
        seq = int(batch.seq_idx[row])
        one = make_ragged([int(batch.positions[row])], [1], [0], torch.device("cuda"))
        to = arguments["to"]
        compressed = to.compressed
        if compressed is not None:
            chosen = compressed.selected
            chosen = None if chosen is None else chosen[row : row + 1].contiguous()
            table = compressed.table[seq : seq + 1].contiguous()
            compressed = type(compressed)(compressed.pool, table, ratio, chosen)
        table = to.table[seq : seq + 1].contiguous()
        to = replace(to, table=table, compressed=compressed, batch=one)
        alone = module.run(arguments["q"][row : row + 1].contiguous(), to)
        assert same_bits(alone, whole[row : row + 1]), row


@pytest.mark.parametrize("name", ["query_prepare", "index_query", "index_scores"])
def test_query_rows_do_not_depend_on_the_batch(name: str) -> None:
    torch.manual_seed(11)
    count = 2048 if name == "index_scores" else 8192
    batch = inputs.prefill_batch(count, 20000, "cuda")
    if name == "index_scores":
        arguments = inputs.scores_arguments(batch, 64, "cuda")
    else:
        arguments = inputs.query_arguments(FLASH, batch, "cuda", name == "index_query")
    whole = outputs(name, arguments)[0]
    for row in (0, 100, count - 1):
        one = make_ragged([int(batch.positions[row])], [1], [0], torch.device("cuda"))
        part = {**arguments, "q": arguments["q"][row : row + 1].contiguous()}
        if name == "index_scores":
            part["weights"] = arguments["weights"][row : row + 1].contiguous()
            part["to"] = replace(arguments["to"], batch=one)
        else:
            part |= {"positions": one.positions}
        assert same_bits(outputs(name, part)[0], whole[row : row + 1]), row


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_rows_that_share_keys_have_the_bits_of_rows_alone(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where four adjacent rows belong to two or three sequences."""
    torch.manual_seed(14)
    module = module_of("index_scores")
    batch = make_ragged(
        [90000, 700, 3, 4000], [5, 1995, 1, 333], [0, 1, 2, 3], torch.device("cuda")
    )
    arguments = inputs.scores_arguments(batch, 16, "cuda", index=index)
    shared = module.run(**arguments)
    assert batch.num_tokens >= module.SHARING * 4
    monkeypatch.setattr(module, "SHARING", 10**9)
    assert same_bits(shared, module.run(**arguments))


@pytest.mark.parametrize("width", [700, 2048, 3000, 9000, 70000])
def test_a_program_per_row_selects_what_several_do(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, entries that are hidden, none, NaN, infinities, equal ones at any distance."""
    torch.manual_seed(15)
    module = module_of("index_select")
    scores = torch.randn(300, width, device="cuda")
    scores[100:200] = (scores[100:200] * 2).round()
    seen = (torch.rand(300, 1, device="cuda") * (width + 1)).long()
    scores.masked_fill_(torch.arange(width, device="cuda") >= seen, float("-inf"))
    scores[0], scores[1], scores[2] = 0.0, float("-inf"), float("inf")
    scores[3, ::3], scores[4, 5::2048], scores[5] = float("nan"), float("inf"), -0.0
    for topk in (512, 1024):
        found = module.run(scores, topk)
        with monkeypatch.context() as patch:
            patch.setattr(module, "MANY_ROWS", 10**9)
            assert torch.equal(found, module.run(scores, topk))
    wanted = OPS["index_select"].reference(scores[6:40].cpu(), 1024)
    assert torch.equal(found[6:40].cpu(), wanted)


@pytest.mark.parametrize(("ratio", "index"), [(4, False), (4, True), (128, False)])
def test_compress_by_chunk_and_by_token(ratio: int, index: bool) -> None:
    torch.manual_seed(12)
    module = module_of("compress")
    batch = make_ragged([3, 250], [300, 9], [1, 0], torch.device("cuda"))
    whole = distinct(on("cpu", inputs.compress_arguments(batch, ratio, index, "cuda")))
    whole = on("cuda", whole)["block"]
    single = copied(whole)
    module.run(whole)
    for row in range(batch.num_tokens):
        seq = int(batch.seq_idx[row])
        slot = int(batch.slots[seq])
        one = make_ragged([int(batch.positions[row])], [1], [slot], torch.device("cuda"))
        part = {key: getattr(single, key)[row : row + 1] for key in ("values", "gates")}
        table = single.table[seq : seq + 1].contiguous()
        module.run(replace(single, **part, batch=one, table=table))
    for key in ("state", "pool"):
        pairs = zip(leaves(getattr(whole, key)), leaves(getattr(single, key)), strict=True)
        assert all(same_bits(a, b) for (_, a), (_, b) in pairs), key


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_state_in_one_launch(ratio: int) -> None:
    """Latent, window key, entry and index key: the bits of the ops one by one."""
    torch.manual_seed(14)
    fused = import_module("dsv4.ops.fused.norm_store_triton")
    batch = make_ragged([126, 127, 9003], [1, 1, 1], [2, 0, 1], torch.device("cuda"))
    norm = {
        "x": torch.randn(3, 1024, device="cuda").bfloat16(),
        "weight": torch.rand(1024, device="cuda"),
        "eps": 1e-6,
    }
    key = distinct(inputs.kv_arguments(batch, "cuda"))["key"]
    blocks = [
        distinct(inputs.compress_arguments(batch, ratio, index, "cuda"))["block"]
        for index in (False, True)[: {0: 0, 4: 2, 128: 1}[ratio]]
    ]
    blocks = [replace(block, table=blocks[0].table) for block in blocks]
    together = {"norm": norm, "key": key, "blocks": blocks}
    mine = copied(together)  # tables are read only, and one for both
    mine["blocks"] = [replace(block, table=blocks[0].table) for block in mine["blocks"]]
    given = (norm["x"], norm["weight"], mine["key"], mine["blocks"])
    assert fused.supports(*given) is None, fused.supports(*given)
    found = fused.run(*given)
    assert same_bits(found, module_of("rms_norm").run(**norm))
    module_of("kv_store").run(key)
    for block in blocks:
        module_of("compress").run(block)
    for (path, a), (_, b) in zip(leaves(together), leaves(mine), strict=True):
        assert same_bits(a, b), path


def test_queries_in_one_launch() -> None:
    torch.manual_seed(15)
    fused = import_module("dsv4.ops.fused.query_and_index_triton")
    batch = inputs.decode_batch(5, 70000, "cuda")
    query = inputs.query_arguments(FLASH, batch, "cuda")
    index = inputs.query_arguments(FLASH, batch, "cuda", index=True)
    weights = torch.randn(5, 64, device="cuda")
    turned = (query["positions"], query["frequencies"], index["index_format"])
    queries = Queries(query["q"], query["eps"])
    queries, *found = fused.run(queries, index["q"], weights, 0.011, *turned)
    assert queries.is_prepared
    module = module_of("query_prepare")
    wanted = module.run(**query), module.run(**index), weights * 0.011
    assert all(same_bits(a, b) for a, b in zip(wanted, (queries.q, *found), strict=True))


@pytest.mark.parametrize(("ratio", "context"), [(0, 9000), (128, 9000), (128, 1000000)])
@pytest.mark.parametrize("shape", [FLASH, PRO], ids=lambda s: s.name)
def test_queries_are_prepared_inside_attention(shape: Any, ratio: int, context: int) -> None:
    torch.manual_seed(16)
    fused = import_module("dsv4.ops.fused.attention_with_queries_triton")
    arguments = inputs.attention_arguments(
        shape, inputs.decode_batch(2, context, "cuda"), ratio, 0, "cuda"
    )
    q, to = arguments["q"] * 3, arguments["to"]
    given = (Queries(q, 1e-6), to)
    assert fused.supports(*given) is None, fused.supports(*given)
    prepared = module_of("query_prepare").run(q, to.batch.positions, to.frequencies, 1e-6)
    wanted = module_of("attention").run(prepared, to)
    assert same_bits(fused.run(*given), wanted)


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("shape", [FLASH, PRO], ids=lambda s: s.name)
def test_queries_are_prepared_inside_a_walk(shape: Any, kind: str) -> None:
    """Of a prompt, next to a few tokens of a long sequence; other variants read prepared ones."""
    torch.manual_seed(18)
    fused = import_module("dsv4.ops.fused.attention_with_queries_triton")
    module = module_of("attention")
    ratio, topk = {"swa": (0, 0), "csa": (4, inputs.TOPK[shape.name]), "hca": (128, 0)}[kind]
    batch = make_ragged([90000, 0], [5, 1995], [0, 1], torch.device("cuda"))
    arguments = inputs.attention_arguments(shape, batch, ratio, topk, "cuda")
    q, to = arguments["q"], arguments["to"]
    q = (q * torch.rand(batch.num_tokens, shape.heads, 1, device="cuda") * 9).bfloat16()
    given = (Queries(q, 1e-6), to)
    assert fused.supports(*given) is None, fused.supports(*given)
    prepared = module_of("query_prepare").run(q, batch.positions, to.frequencies, 1e-6)
    wanted = module.run(prepared, to, config=module.AttentionVariant(64, False, 8, 2))
    assert same_bits(fused.run(*given), wanted)


def test_queries_of_narrow_heads_are_prepared_inside_attention() -> None:
    """A head's squares are summed in one order however many warps attention would like: a wrong
    one shows in one row of thousands."""
    torch.manual_seed(17)
    fused = import_module("dsv4.ops.fused.attention_with_queries_triton")
    batch = make_ragged([15], [4096], [0], torch.device("cuda"))
    pool = _filled(torch.Generator().manual_seed(1), "fp8", 32, 2, 64)
    pool = on("cuda", pool)
    frequencies = rope_frequencies(16, 10000.0).cuda()
    q = torch.randn(4096, 4, 32, device="cuda").bfloat16() * 3
    prepared = module_of("query_prepare").run(q, batch.positions, frequencies, 1e-6)
    places = {
        "sink": torch.randn(4, device="cuda"), "pool": pool, "compressed": None, "window": 16,
        "frequencies": frequencies, "table": torch.zeros(1, 65, dtype=torch.int64, device="cuda"),
    }  # fmt: skip
    spans = [(first, 4) for first in range(0, 2048, 4)] + [(2048, 128), (2176, 86)]
    for first, count in spans:
        rows = slice(first, first + count)
        some = make_ragged([15 + first], [count], [0], torch.device("cuda"))
        to = Visible(**places, batch=some)
        queries = Queries(q[rows].contiguous(), 1e-6)
        assert fused.supports(queries, to) is None
        wanted = module_of("attention").run(prepared[rows].contiguous(), to)
        assert same_bits(fused.run(queries, to), wanted), rows


def test_graph_capture_allocates_nothing_new() -> None:
    """A decode step's ops replay in a graph and give what they gave outside it."""
    torch.manual_seed(13)
    batch = inputs.decode_batch(4, 9000, "cuda")
    todo = [
        ("attention", inputs.attention_arguments(FLASH, batch, 4, 512, "cuda")),
        ("index_scores", inputs.scores_arguments(batch, 64, "cuda")),
        ("mhc_boundary", inputs.mhc_arguments(FLASH, 4, "cuda")),
        ("sample", inputs.sample_arguments(4, "cuda", 129280, True)),
    ]
    before = [outputs(name, arguments) for name, arguments in todo]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = [outputs(name, arguments) for name, arguments in todo]
    graph.replay()
    torch.cuda.synchronize()
    for old, new in zip(before, after, strict=True):
        assert all(same_bits(a, b) for a, b in zip(old, new, strict=True))
