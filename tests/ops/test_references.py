"""Every case of every op: it runs, repeats, keeps its hands off, and rows stand alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.ops import OPS, Case
from dsv4.ops.attention import index
from dsv4.ops.attention.attention import attention
from dsv4.ops.attention.index import index_scores, index_select
from dsv4.ops.attention.query import index_query, query_prepare
from dsv4.ops.comm.own_experts import own_experts
from dsv4.ops.core.arguments import argument, changed_argument, copied, leaves, same_bits
from dsv4.ops.core.batch_invariance import matmul_rows
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear_multi
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.kv.begin_step import begin_step
from dsv4.ops.kv.compress import compress
from dsv4.ops.kv.kv_store import kv_store
from dsv4.ops.kv.pool import PagedPool
from dsv4.ops.kv.rope import rope
from dsv4.ops.mhc.mix import Update, mhc_boundary, mhc_head, mhc_pre, mhc_update
from dsv4.ops.moe.experts import experts_ffn
from dsv4.ops.moe.router import router
from dsv4.ops.norm.rms_norm import rms_norm
from dsv4.ops.sample.accept import accept
from dsv4.ops.sample.draft_rows import draft_rows
from dsv4.ops.sample.sample import WIDE, SampleInputs, sample
from dsv4.ops.sample.verify import verify

Arguments = dict[str, Any]
HAS_MKL = torch.backends.mkl.is_available()
PUBLIC: dict[str, Callable[..., Any]] = {
    "begin_step": begin_step,
    "draft_rows": draft_rows,
    "embed": embed,
    "rms_norm": rms_norm,
    "mhc_pre": mhc_pre,
    "mhc_boundary": mhc_boundary,
    "mhc_head": mhc_head,
    "mhc_update": mhc_update,
    "linear": linear_multi,
    "grouped_linear": grouped_linear,
    "rope": rope,
    "query_prepare": query_prepare,
    "kv_store": kv_store,
    "compress": compress,
    "index_query": index_query,
    "index_scores": index_scores,
    "index_select": index_select,
    "attention": attention,
    "router": router,
    "experts": experts_ffn,
    "own_experts": own_experts,
    "sample": sample,
    "accept": accept,
    "verify": verify,
}
CASES = [
    pytest.param(name, case, id=f"{name}: {case.name}")
    for name, op in OPS.items()
    for case in op.cases()
]


def build(case: Case, seed: int = 0) -> Arguments:
    return case.build(torch.Generator().manual_seed(seed))


def num_rows(name: str, a: Arguments) -> int:
    for value in a.values():
        if hasattr(value, "batch"):
            return value.batch.num_tokens  # type: ignore[no-any-return]
    return argument(a, FIRST[name] if name in FIRST else ROWS[name][0]).shape[0]


# Arguments whose first axis is the row (or token), for ops whose rows are independent.
ROWS: dict[str, tuple[str, ...]] = {
    "embed": ("token_ids",),
    "rms_norm": ("x",),
    "mhc_pre": ("streams",),
    "mhc_boundary": ("streams", "update"),
    "mhc_head": ("streams", "update"),
    "mhc_update": ("streams", "update"),
    "linear": ("x",),
    "grouped_linear": ("x",),
    "rope": ("x", "positions"),
    "query_prepare": ("q", "positions"),
    "index_query": ("q", "positions"),
    "index_select": ("scores",),
    "router": ("x", "token_ids"),
    "experts": ("x", "experts", "weights"),
    "own_experts": ("experts",),
    "sample": ("logits", "inputs"),
}
# a row of these writes to its slot
FIRST = {
    "begin_step": "step.sent",
    "draft_rows": "given.sent",
    "accept": "tokens",
    "verify": "rows.tokens",
}


def test_every_op_is_walked() -> None:
    assert PUBLIC.keys() == OPS.keys()
    others = {"kv_store", "compress", "index_scores", "attention", *FIRST}
    assert ROWS.keys() == OPS.keys() - others
    for name, op in OPS.items():
        names = [case.name for case in op.cases()]
        assert len(names) == len(set(names)) >= 2, name
        assert any(case.small for case in op.cases()), name


def expected_results(name: str, a: Arguments) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of an op's results, in order."""
    rows, fp32, int64 = num_rows(name, a), torch.float32, torch.int64
    if name in ("kv_store", "compress", *FIRST):
        return []
    if name == "embed":
        return [((rows, a["num_streams"], a["table"].shape[1]), a["dtype"])]
    if name.startswith("mhc"):
        _, n, size = a["streams"].shape
        x = ((rows, size), a["streams"].dtype)
        coefficients = [((rows, n), fp32), ((rows, n, n), fp32)]
        streams = ((rows, n, size), a["streams"].dtype)
        return {
            "mhc_pre": [x, *coefficients],
            "mhc_boundary": [streams, x, *coefficients],
            "mhc_head": [x],
            "mhc_update": [streams],
        }[name]
    if name == "own_experts":
        return [((rows, a["experts"].shape[1]), int64)]
    if name == "linear":
        pairs = zip(a["weights"], a["out_dtypes"], strict=True)
        return [((rows, weight.shape[0]), dtype) for weight, dtype in pairs]
    if name == "grouped_linear":
        return [((rows, a["weight"].shape[0]), a["x"].dtype)]
    if name == "index_scores":
        most = int((a["to"].batch.positions.max() + 1) // index.RATIO)
        return [((rows, -(-most // index.KEY_TILE) * index.KEY_TILE), fp32)]
    if name == "index_select":
        return [((rows, min(a["topk"], a["scores"].shape[1])), int64)]
    if name == "router":
        return [((rows, a["by"].num_chosen), int64), ((rows, a["by"].num_chosen), fp32)]
    if name == "sample":
        return [((rows,), int64), ((rows,), fp32)]
    same = a["q"] if "q" in a else a["x"]
    return [(tuple(same.shape), same.dtype)]


def results_of(name: str, arguments: Arguments) -> list[Tensor]:
    result = PUBLIC[name](**arguments)
    return [tensor for _, tensor in leaves(result)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_case_runs_and_repeats(name: str, case: Case) -> None:
    arguments, again = build(case), build(case)
    before = copied(arguments)
    results = results_of(name, arguments)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
    assert found == expected_results(name, before)
    for tensor in results:
        if name == "index_scores":
            assert not torch.isnan(tensor).any()
        else:
            assert torch.isfinite(tensor.double()).all()
    for tensor, other in zip(results, results_of(name, again), strict=True):
        assert same_bits(tensor, other)
    # and what is written in place repeats too, and nothing else is touched
    written = set()
    for (path, old), (_, new), (_, twin) in zip(
        leaves(before), leaves(arguments), leaves(again), strict=True
    ):
        assert same_bits(new, twin), path
        if not same_bits(old, new):
            written.add(declared(name, path))
    assert written <= set(OPS[name].mutates)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.mutates])
def test_declared_arguments_are_written(name: str) -> None:
    written = set()
    for case in OPS[name].cases():
        arguments = build(case)
        before = copied(arguments)
        results_of(name, arguments)
        for (path, old), (_, new) in zip(leaves(before), leaves(arguments), strict=True):
            if not same_bits(old, new):
                written.add(declared(name, path))
    assert written == set(OPS[name].mutates)


def declared(name: str, path: str) -> str:
    """The declared argument that a path belongs to, or the path."""
    found = (m for m in OPS[name].mutates if path == m or path.startswith((f"{m}.", f"{m}[")))
    return next(found, path)


@pytest.mark.parametrize(("name", "case"), [c for c in CASES if c.values[0] in ROWS])
def test_a_row_does_not_depend_on_the_others(name: str, case: Case) -> None:
    arguments = build(case)
    rows = num_rows(name, arguments)
    if rows < 2:
        arguments = stretched(name, arguments)
        rows = num_rows(name, arguments)
    whole = results_of(name, arguments)
    generator = torch.Generator().manual_seed(1)
    for count in {1, rows // 2, rows - 1}:
        chosen = torch.randperm(rows, generator=generator)[:count]
        part = {
            key: on_rows(value, lambda t, c=chosen: t[c]) if key in ROWS[name] else value
            for key, value in arguments.items()
        }
        for all_rows, some in zip(whole, results_of(name, part), strict=True):
            assert same_bits(all_rows[chosen], some), f"{count} of {rows} rows"


ORDERS = {"by rows": lambda weight: weight, "by columns": lambda weight: weight.mT.contiguous().mT}


@pytest.mark.skipif(not HAS_MKL, reason="about MKL's threads")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_products_do_not_depend_on_threads(threads: int, order: str) -> None:
    """One tile beside several. MKL divides long sums of a lone tile between threads, and gives
    them blocks of columns, of which the last one may be narrow: sizes where it showed."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(2)
    long = ((160, 70), (192, 128), (320, 96), (384, 64), (640, 33), (1040, 200))
    narrow = ((32, 17), (64, 24), (31, 7), (128, 100), (512, 200))
    try:
        for k, n in (*long, *narrow):
            x, weight = (torch.randn(m, k, generator=generator) for m in (17, n))
            weight = ORDERS[order](weight)
            torch.set_num_threads(1)
            wanted = matmul_rows(x, weight)
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(3, 11), slice(0, 17)):
                assert same_bits(matmul_rows(x[rows], weight), wanted[rows]), (k, n, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [31, 64, 512] if HAS_MKL else [64, 256])
def test_columns_do_not_depend_on_the_others(k: int, order: str) -> None:
    """Ranks hold slices of a matrix, which may be narrow; with MKL any slice will do."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(m, k, generator=generator) for m in (9, 96))
    weight = ORDERS[order](weight)
    wanted = matmul_rows(x, weight)
    for width in (8, 12, 24, 32, *((1, 4, 6) if HAS_MKL else ())):
        for first in range(0, 96, width):
            own = slice(first, first + width)
            assert same_bits(matmul_rows(x, weight[own]), wanted[:, own]), own


@pytest.mark.skipif(
    not HAS_MKL or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="without AVX-512 the tests above are about this",
)
def test_bits_are_kept_without_avx512() -> None:
    """MKL takes other ways there; on Intel's CPUs rows then depended on their batch."""
    which = "rows or columns or threads or (depend_on_the_others and (linear or mhc_head))"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", which],
        env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        check=True,
    )


def stretched(name: str, arguments: Arguments) -> Arguments:
    """A case with no or one row, grown to eleven different ones."""

    def grow(tensor: Tensor) -> Tensor:
        if tensor.shape[0] == 0:
            return torch.zeros(11, *tensor.shape[1:], dtype=tensor.dtype)
        many = tensor.expand(11, *tensor.shape[1:]).clone()
        if tensor.is_floating_point() and tensor.dim() > 1:
            many *= torch.linspace(0.5, 1.5, 11).view(-1, *[1] * (tensor.dim() - 1)).to(many.dtype)
        return many

    return {
        key: on_rows(value, grow) if key in ROWS[name] else value
        for key, value in arguments.items()
    }


def on_rows(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with its rows changed; those of a row in parts are not its first axis."""
    if isinstance(value, PartialSums):
        return PartialSums(
            change(value.values.movedim(2, 0)).movedim(0, 2), value.factor, value.dtype
        )
    if isinstance(value, Update):
        return Update(*(on_rows(getattr(value, f.name), change) for f in fields(value)))
    if isinstance(value, SampleInputs):  # what slots hold stays
        of_rows = {f.name for f in fields(value)} - set(WIDE)
        return replace(value, **{name: change(getattr(value, name)) for name in of_rows})
    return copied(value, change)


# --- pages that were never written are never read ---------------------------------------------


def poison(tensor: Tensor, keep: Tensor) -> None:
    """Overwrite entries `[pages, entries]` outside `keep` with NaN (bytes: 0xFF)."""
    if tensor.dtype in (torch.float32, torch.bfloat16):
        tensor[~keep] = float("nan")
    else:
        tensor.view(torch.uint8)[~keep] = 255


def poison_pool(pool: PagedPool, needed: set[tuple[int, int]]) -> None:
    keep = torch.zeros(pool.data.shape[:2], dtype=torch.bool)
    for page, offset in needed:
        keep[page, offset] = True
    for part in pool.parts.values():
        poison(part, keep)


def places(table: Tensor, sequence: int, entries: list[int], size: int) -> set[tuple[int, int]]:
    width = table.shape[1]
    return {(int(table[sequence, e // size % width]), e % size) for e in entries}


@pytest.mark.parametrize("case", list(OPS["attention"].cases()), ids=lambda c: c.name)
def test_attention_reads_only_what_a_query_sees(case: Case) -> None:
    arguments = build(case)
    to = arguments["to"]
    batch, pool, compressed = to.batch, to.pool, to.compressed
    clean = PUBLIC["attention"](**arguments)
    in_window: set[tuple[int, int]] = set()
    in_entries: set[tuple[int, int]] = set()
    for row, (p, seq) in enumerate(
        zip(batch.positions.tolist(), batch.seq_idx.tolist(), strict=True)
    ):
        seen = [j for j in range(p - to.window + 1, p + 1) if j >= 0]
        in_window |= places(to.table, seq, seen, pool.page_entries)
        if compressed is not None:
            if compressed.selected is None:
                entries = list(range((p + 1) // compressed.ratio))
            else:
                entries = [e for e in compressed.selected[row].tolist() if e >= 0]
            in_entries |= places(compressed.table, seq, entries, compressed.pool.page_entries)
    poison_pool(pool, in_window)
    if compressed is not None:
        poison_pool(compressed.pool, in_entries)
    assert same_bits(PUBLIC["attention"](**arguments), clean)
    # the poison works: one entry that is needed makes the result NaN
    poison_pool(pool, in_window - {next(iter(in_window))})
    assert torch.isnan(PUBLIC["attention"](**arguments)).any()


@pytest.mark.parametrize("case", list(OPS["index_scores"].cases()), ids=lambda c: c.name)
def test_index_scores_read_only_visible_keys(case: Case) -> None:
    arguments = build(case)
    to = arguments["to"]
    batch, pool = to.batch, to.pool
    clean = index_scores(**arguments)
    needed: set[tuple[int, int]] = set()
    for p, seq in zip(batch.positions.tolist(), batch.seq_idx.tolist(), strict=True):
        visible = (p + 1) // 4
        if visible > to.topk:
            needed |= places(to.table, seq, list(range(visible)), pool.page_entries)
    poison_pool(pool, needed)
    assert same_bits(index_scores(**arguments), clean)


@pytest.mark.parametrize("case", list(OPS["compress"].cases()), ids=lambda c: c.name)
def test_compress_reads_only_rows_of_earlier_tokens(case: Case) -> None:
    """Rows of tokens before the beginning, and rows no open block needs, may hold anything."""
    block, clean = build(case)["block"], build(case)["block"]
    batch, state, ratio = block.batch, block.state, block.ratio
    keep = torch.zeros(state.values.shape[:2], dtype=torch.bool)
    for start, slot in zip(batch.starts.tolist(), batch.slots.tolist(), strict=True):
        open_block = start - start % ratio
        first = open_block - ratio if ratio == 4 else open_block
        for token in range(max(first, 0), start):
            keep[slot, token % state.rows] = True
    for tensor in (state.values, state.gates):
        poison(tensor, keep)
    compress(block)
    compress(clean)
    for name, part in block.pool.parts.items():
        assert same_bits(part, clean.pool.parts[name]), name


@pytest.mark.parametrize("name", ["kv_store", "compress"])
def test_only_the_new_entries_are_written(name: str) -> None:
    for case in OPS[name].cases():
        ((_, given),) = build(case).items()
        before, batch, pool = copied(given.pool), given.batch, given.pool
        PUBLIC[name](given)
        ratio = getattr(given, "ratio", 1)
        touched = torch.zeros(pool.data.shape[:2], dtype=torch.bool)
        for p, seq in zip(batch.positions.tolist(), batch.seq_idx.tolist(), strict=True):
            if (p + 1) % ratio == 0:
                for page, offset in places(given.table, seq, [p // ratio], pool.page_entries):
                    touched[page, offset] = True
        for part in pool.parts:
            old, new = (t.parts[part].view(torch.uint8)[~touched] for t in (before, pool))
            assert torch.equal(old, new), f"{case.name}: {part}"


# --- wrong arguments --------------------------------------------------------------------------


def more_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]])


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


WRONG: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("embed", "token_ids", lambda t: t.unsqueeze(0)),
    ("embed", "table", lambda t: t.flatten()),
    ("rms_norm", "weight", narrower),
    ("mhc_pre", "site", lambda s: replace(s, fn=narrower(s.fn))),
    ("mhc_pre", "site", lambda s: replace(s, base=narrower(s.base))),
    ("mhc_pre", "site", lambda s: replace(s, fn=s.fn.bfloat16())),
    ("mhc_pre", "site", lambda s: replace(s, norm=narrower(s.norm))),
    ("mhc_pre", "site", lambda s: replace(s, scale=narrower(s.scale))),
    ("mhc_pre", "streams", lambda t: t[:, 0]),
    ("mhc_boundary", "update.y", more_rows),
    ("mhc_boundary", "update.y", narrower),
    ("mhc_boundary", "update.post", narrower),
    ("mhc_boundary", "update.comb", narrower),
    ("mhc_head", "update.y", narrower),
    ("mhc_head", "update.comb", more_rows),
    ("mhc_update", "update.y", more_rows),
    ("mhc_update", "update.post", narrower),
    ("linear", "x", lambda t: t.unsqueeze(0)),
    ("linear", "weights", lambda ws: [narrower(w) for w in ws]),
    ("linear", "weights", lambda ws: [w[0] for w in ws]),
    ("linear", "out_dtypes", lambda dtypes: [*dtypes, torch.float32]),
    ("grouped_linear", "x", lambda t: t.flatten(1)),
    ("grouped_linear", "weight", narrower),
    ("grouped_linear", "weight", lambda t: t[:-1]),
    ("rope", "positions", more_rows),
    ("rope", "frequencies", lambda t: torch.cat([t] * 20)),
    ("query_prepare", "q", lambda t: t[0]),
    ("query_prepare", "positions", more_rows),
    ("query_prepare", "frequencies", lambda t: torch.cat([t] * 20)),
    ("index_query", "q", lambda t: t[0]),
    ("index_query", "positions", more_rows),
    ("index_query", "index_format", lambda _: "int8"),
    ("kv_store", "key.kv", narrower),
    ("kv_store", "key.kv", more_rows),
    ("kv_store", "key.table", lambda t: t[0]),
    ("compress", "block.values", narrower),
    ("compress", "block.gates", more_rows),
    ("compress", "block.values", lambda t: t.double()),
    ("compress", "block.ape", lambda t: t[:-1]),
    ("compress", "block.ratio", lambda _: 8),
    ("index_scores", "weights", narrower),
    ("index_scores", "q", narrower),
    ("index_select", "scores", lambda t: t[0]),
    ("index_select", "topk", lambda _: 0),
    ("attention", "q", more_rows),
    ("attention", "q", narrower),
    ("attention", "to.sink", narrower),
    ("router", "by.gate", narrower),
    ("router", "by.bias", narrower),
    ("router", "token_ids", more_rows),
    ("router", "by.num_chosen", lambda _: 1000),
    ("experts", "by.w13", narrower),
    ("experts", "by.w2", narrower),
    ("experts", "by.shared_w13", narrower),
    ("experts", "by.shared_w2", lambda t: t[:-1]),
    ("experts", "experts", more_rows),
    ("experts", "weights", narrower),
    ("own_experts", "experts", lambda t: t[0]),
    ("own_experts", "experts", lambda t: t.int()),
    ("sample", "logits", lambda t: t.bfloat16()),
    ("sample", "logits", lambda t: t[0]),
    ("sample", "inputs", lambda s: replace(s, temperature=more_rows(s.temperature))),
    ("sample", "inputs", lambda s: replace(s, bias=torch.zeros(1, 3))),
    ("sample", "inputs", lambda s: replace(s, seen=torch.zeros(1, 3))),
    ("begin_step", "step.token_ids", more_rows),
    ("begin_step", "step.seq_idx", more_rows),
    ("begin_step", "step.rows", lambda rows: tuple(map(more_rows, rows))),
    ("accept", "logits", more_rows),
    ("accept", "target", lambda t: replace(t, norms=more_rows(t.norms))),
    ("draft_rows", "given.starts", more_rows),
    ("draft_rows", "given.slots", more_rows),
    ("verify", "rows.inputs", more_rows),
    ("verify", "rows.ends", more_rows),
]


def test_every_op_checks_its_arguments() -> None:
    assert {name for name, _, _ in WRONG} == OPS.keys()


@pytest.mark.parametrize(
    ("name", "path", "change"), WRONG, ids=[f"{i}-{n}-{a}" for i, (n, a, _) in enumerate(WRONG)]
)
def test_wrong_shapes_are_refused_by_name(name: str, path: str, change: Any) -> None:
    for case in OPS[name].cases():
        arguments = build(case)
        if num_rows(name, arguments) and argument(arguments, path) is not None:
            break
    arguments = changed_argument(arguments, path, change(argument(arguments, path)))
    with pytest.raises(KernelError) as caught:
        PUBLIC[name](**arguments)
    assert str(caught.value).startswith(f"{name}: ")


def test_a_router_has_a_bias_or_a_table() -> None:
    arguments = build(next(iter(OPS["router"].cases())))
    by = arguments["by"]
    for table in (None, torch.zeros(20, 2, dtype=torch.int64)):
        bias = None if table is None else by.bias
        with pytest.raises(KernelError, match="router"):
            PUBLIC["router"](**{**arguments, "by": replace(by, bias=bias, table=table)})
