"""Time the state ops at the sizes of V4-Flash and V4-Pro: `python benchmarks/state_ops.py --help`.

The harness, the ceilings and the record are those of `dsv4 bench ops`; here are only inputs.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.geometry import PAGE_ENTRIES
from dsv4.formats.entry import index_entry, kv_entry
from dsv4.ops import OPS
from dsv4.ops.attention.attention import Compressed, Visible
from dsv4.ops.attention.index import IndexEntries
from dsv4.ops.core.op import Arguments
from dsv4.ops.core.ragged import Ragged, make_ragged
from dsv4.ops.kv.compress import Compression, CompressorState, state_rows
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.kv.pool import PagedPool, allocate_pool
from dsv4.ops.kv.rope import yarn_frequencies
from dsv4.ops.mhc.mix import MixSite, Update
from dsv4.ops.sample.sample import SampleInputs
from dsv4.tools.bench_ops import (
    SHAPES,
    Ceilings,
    ModelShape,
    OpBenchmark,
    Result,
    measure,
    measure_ceilings,
)
from dsv4.tools.bench_ops import write_record as save

DIM, ROPE, INDEX_DIM, INDEX_HEADS, WINDOW = 512, 64, 128, 64, 128
KV_BYTES, INDEX_BYTES = 584, 68
ROTATED_BYTES = 300 << 20
TOPK = {"flash": 512, "pro": 1024}


def frequencies(device: str) -> Tensor:
    return yarn_frequencies(ROPE, 160000.0, 16.0, 65536, 32.0, 1.0).to(device)


def random_pool(pages: int, entries: int, device: str, index: str = "") -> PagedPool:
    """A full pool: any code but NaN, scales near one. `index`: of keys in this format."""
    parts = index_entry(index, INDEX_DIM) if index else kv_entry("fp8", DIM, ROPE)
    pool = allocate_pool(index or "fp8", bool(index), parts, (pages, entries), device)
    codes = pool.data.view(torch.uint8)
    codes.random_(0, 256 if index == "fp4" else 120)
    if index == "fp8":
        pool.parts["scale"].fill_(0.5)
    else:
        pool.parts["scale"].random_(119, 122)
    if index != "fp4":
        codes.bitwise_or_(torch.randint_like(codes, 0, 2) << 7)
    if not index:
        pool.parts["tail"].normal_()
    return pool


def random_table(sequences: int, columns: int, pages: int, device: str) -> Tensor:
    return torch.randint(0, pages, (sequences, columns), device=device)


def decode_batch(sequences: int, context: int, device: str, new: int = 1) -> Ragged:
    starts = [context - new - (7 * i) % 64 for i in range(sequences)]
    count = [new] * sequences
    return make_ragged(starts, count, list(range(sequences)), torch.device(device))


def prefill_batch(tokens: int, context: int, device: str) -> Ragged:
    return make_ragged([context - tokens], [tokens], [0], torch.device(device))


def mhc_arguments(shape: ModelShape, tokens: int, device: str, head: bool = False) -> Arguments:
    n, size = 4, shape.hidden
    rows = n if head else 24
    site = MixSite(
        torch.randn(rows, n * size, device=device) * 0.02,
        torch.randn(rows, device=device),
        torch.ones(1 if head else 3, device=device),
        torch.ones(size, device=device),
        1e-6,
        1e-6,
        20,
    )
    return {
        "streams": torch.randn(tokens, n, size, device=device).bfloat16(),
        "update": Update(
            torch.randn(tokens, size, device=device).bfloat16(),
            torch.rand(tokens, n, device=device),
            torch.rand(tokens, n, n, device=device) / n,
        ),
        "site": site,
    }


def kv_arguments(batch: Ragged, device: str, pages: int = 512) -> Arguments:
    key = WindowKey(
        kv=torch.randn(batch.num_tokens, DIM, device=device).bfloat16(),
        norm=torch.ones(DIM, device=device),
        frequencies=frequencies(device),
        eps=1e-6,
        batch=batch,
        pool=random_pool(pages, PAGE_ENTRIES["window"], device),
        table=random_table(batch.starts.shape[0], 131, pages, device),
    )
    return {"key": key}


def compress_arguments(batch: Ragged, ratio: int, index: bool, device: str) -> Arguments:
    dim = INDEX_DIM if index else DIM
    width, sequences = dim * (2 if ratio == 4 else 1), batch.starts.shape[0]
    state = (sequences, state_rows(ratio), width)
    block = Compression(
        values=torch.randn(batch.num_tokens, width, device=device),
        gates=torch.randn(batch.num_tokens, width, device=device),
        ape=torch.randn(ratio, width, device=device),
        norm=torch.ones(dim, device=device),
        frequencies=frequencies(device),
        eps=1e-6,
        ratio=ratio,
        dtype=torch.bfloat16,
        state=CompressorState(torch.randn(state, device=device), torch.randn(state, device=device)),
        batch=batch,
        pool=random_pool(512, 32, device, "fp4" if index else ""),
        table=random_table(sequences, int(batch.ends.max()) // ratio // 32 + 1, 512, device),
    )
    return {"block": block}


def random_selection(batch: Ragged, topk: int) -> Tensor:
    """Random entries, ascending; padded with -1 if fewer than topk are visible."""
    visible = torch.div(batch.positions + 1, 4, rounding_mode="floor")
    width = int(visible.max())
    out = torch.empty(batch.num_tokens, topk, dtype=torch.int64, device=batch.device)
    for first in range(0, batch.num_tokens, 256):
        shown = visible[first : first + 256]
        score = torch.rand(shown.shape[0], max(width, topk), device=batch.device)
        entry = torch.arange(score.shape[1], device=batch.device)
        kept = score.masked_fill(entry >= shown.unsqueeze(1), -1.0).topk(topk, dim=1)
        chosen = kept.indices.masked_fill(kept.values < 0, width).sort(1).values
        out[first : first + 256] = chosen.masked_fill(chosen == width, -1)
    return out


def attention_arguments(
    shape: ModelShape, batch: Ragged, ratio: int, topk: int, device: str, pages: int = 2048
) -> Arguments:
    sequences = batch.starts.shape[0]
    compressed = None
    if ratio:
        columns = int(batch.ends.max()) // ratio // 32 + 1
        selected = random_selection(batch, topk) if topk else None
        table = random_table(sequences, columns, pages, device)
        compressed = Compressed(random_pool(pages, 32, device), table, ratio, selected)
    q = torch.randn(batch.num_tokens, shape.heads, DIM, device=device).bfloat16()
    to = Visible(
        sink=torch.randn(shape.heads, device=device),
        pool=random_pool(pages // 2, 64, device),
        table=random_table(sequences, 131, pages // 2, device),
        compressed=compressed,
        batch=batch,
        window=WINDOW,
        frequencies=frequencies(device),
    )
    return {"q": q, "to": to}


def query_arguments(
    shape: ModelShape, batch: Ragged, device: str, index: bool = False
) -> Arguments:
    heads, dim = (INDEX_HEADS, INDEX_DIM) if index else (shape.heads, DIM)
    extra: Arguments = {"index_format": "fp4"} if index else {"eps": 1e-6}
    return {
        "q": torch.randn(batch.num_tokens, heads, dim, device=device).bfloat16(),
        "positions": batch.positions,
        "frequencies": frequencies(device),
        **extra,
    }


def scores_arguments(
    batch: Ragged, topk: int, device: str, pages: int = 8192, index: str = "fp4"
) -> Arguments:
    columns = int(batch.ends.max()) // 4 // 32 + 1
    query = torch.randn(batch.num_tokens, INDEX_HEADS, INDEX_DIM, device=device)
    return {
        "q": (query * 2).round().bfloat16(),
        "weights": torch.randn(batch.num_tokens, INDEX_HEADS, device=device) * 0.01,
        "to": IndexEntries(
            random_pool(pages, 32, device, index),
            random_table(batch.starts.shape[0], columns, pages, device),
            batch,
            topk,
        ),
    }


def sample_arguments(rows: int, device: str, vocabulary: int, filtered: bool) -> Arguments:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    inputs = SampleInputs(
        temperature=full(1.0),
        top_k=torch.full((rows,), 50 if filtered else 0, device=device),
        top_p=full(0.95 if filtered else 1.0),
        min_p=full(0.0),
        repetition=full(1.0),
        presence=full(0.0),
        frequency=full(0.0),
        seeds=torch.randint(0, 2**62, (rows,), device=device),
        positions=torch.randint(0, 10**6, (rows,), device=device),
        slots=torch.arange(rows, device=device),
        flags=torch.zeros(rows, dtype=torch.int64, device=device),
        seen=torch.zeros(rows, vocabulary, dtype=torch.int32, device=device),
        bias=torch.zeros(rows, vocabulary, device=device),
        mask=torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32, device=device),
    )
    return {"logits": torch.randn(rows, vocabulary, device=device) * 3, "inputs": inputs}


def small_arguments() -> Iterator[tuple[str, str, Arguments]]:
    """Arguments for each kernel at Flash's widths with few rows, on the CPU, for compilers."""
    shape, cpu = SHAPES["flash"], "cpu"
    one, two = decode_batch(2, 9000, cpu), decode_batch(1, 9000, cpu, new=2)
    for tokens in (1, 8, 128, 4096):
        yield "mhc_boundary", f"{tokens}", mhc_arguments(shape, tokens, cpu)
    yield (
        "rms_norm",
        "",
        {"x": torch.zeros(2, 1024).bfloat16(), "weight": torch.zeros(1024), "eps": 1e-6},
    )
    yield "kv_store", "", kv_arguments(one, cpu, 4)
    yield "query_prepare", "", query_arguments(shape, one, cpu)
    yield "index_query", "", query_arguments(shape, one, cpu, index=True)
    yield "compress", "csa", compress_arguments(one, 4, False, cpu)
    yield "compress", "index", compress_arguments(two, 4, True, cpu)
    yield "compress", "hca", compress_arguments(one, 128, False, cpu)
    batches = [decode_batch(n, 9000, cpu) for n in (2, 32, 100)]  # each a different variant
    for batch in (*batches, prefill_batch(160, 9000, cpu)):
        arguments = attention_arguments(shape, batch, 4, 512, cpu, 4)
        yield "attention", f"csa {batch.num_tokens}", arguments
    longest = attention_arguments(shape, decode_batch(1, 1048576, cpu), 128, 0, cpu, 4)
    yield "attention", "hca 1M", longest
    yield "index_scores", "", scores_arguments(one, 512, cpu, 4)
    for index in ("fp4", "fp8"):
        arguments = scores_arguments(prefill_batch(160, 9000, cpu), 512, cpu, 4, index)
        yield "index_scores", f"prompt {index}", arguments
    for rows, width in ((1, 4096), (1, 32768), (300, 2048), (300, 32768)):
        yield "index_select", f"{rows} x {width}", {"scores": torch.zeros(rows, width), "topk": 512}
    yield "sample", "", sample_arguments(1, cpu, 129280, True)


def plans(
    shape: ModelShape,
) -> Iterator[tuple[str, str, int, Callable[[], Arguments], float, float]]:
    """(op, label, tokens, arguments, bytes, operations) of every timed case."""
    gpu, h, heads, topk = "cuda", shape.hidden, shape.heads, TOPK[shape.name]
    for t in (1, 8, 32, 128, 8192):
        moved = t * h * (4 * 2 * 2 + 2 + 2) + 24 * 4 * h * 4
        yield (
            "mhc_boundary",
            "mhc_boundary",
            t,
            lambda t=t: mhc_arguments(shape, t, gpu),
            moved,
            0.0,
        )
    for t in (1, 32, 8192):
        batch = (lambda t=t: decode_batch(t, 9000, gpu)) if t < 999 else None
        make = batch or (lambda t=t: prefill_batch(t, 16384, gpu))
        row = heads * DIM * 4.0
        yield (
            "query_prepare", "query_prepare", t,
            lambda make=make: query_arguments(shape, make(), gpu), t * row, 0.0,
        )  # fmt: skip
        yield (
            "index_query", "index_query", t,
            lambda make=make: query_arguments(shape, make(), gpu, True),
            t * INDEX_HEADS * INDEX_DIM * 4.0, 0.0,
        )  # fmt: skip
        moved = t * (DIM * 2.0 + KV_BYTES)
        yield "kv_store", "kv_store", t, lambda make=make: kv_arguments(make(), gpu), moved, 0.0
        for ratio, index in ((4, False), (4, True), (128, False)):
            width = (INDEX_DIM if index else DIM) * (2 if ratio == 4 else 1)
            label = f"compress {ratio}{' index' if index else ''}"
            yield (
                "compress", label, t,
                lambda make=make, r=ratio, i=index: compress_arguments(make(), r, i, gpu),
                t * width * 8.0 * (2 if t < 999 else 1), 0.0,
            )  # fmt: skip
    for t in (1, 8, 32, 128):
        yield (
            "attention", "attention csa", t,
            lambda t=t: attention_arguments(shape, decode_batch(t, 32768, gpu), 4, topk, gpu),
            t * ((topk + WINDOW) * KV_BYTES + heads * DIM * 4.0),
            t * heads * (topk + WINDOW) * DIM * 4.0,
        )  # fmt: skip
    for t in (1, 32):
        yield (
            "attention", "attention hca 128k", t,
            lambda t=t: attention_arguments(shape, decode_batch(t, 131072, gpu), 128, 0, gpu),
            t * (1152 * KV_BYTES + heads * DIM * 4.0), t * heads * 1152 * DIM * 4.0,
        )  # fmt: skip
    yield (
        "attention", "attention prefill", 8192,
        lambda: attention_arguments(shape, prefill_batch(8192, 16384, gpu), 4, topk, gpu),
        8192.0 * heads * DIM * 4, 8192.0 * heads * (topk + WINDOW) * DIM * 4,
    )  # fmt: skip
    for t, context in ((1, 4096), (1, 131072), (1, 1048576), (32, 131072)):
        yield (
            "index_scores", f"index_scores {context // 1024}k", t,
            lambda t=t, c=context: scores_arguments(decode_batch(t, c, gpu), 0, gpu),
            t * context / 4 * (INDEX_BYTES + 4.0), t * context / 4 * INDEX_HEADS * INDEX_DIM * 2.0,
        )  # fmt: skip
    for rows, width in ((1, 32768), (1, 262144), (32, 32768)):
        yield (
            "index_select", f"index_select {width // 1024}k", rows,
            lambda r=rows, w=width: {"scores": torch.randn(r, w, device=gpu), "topk": topk},
            rows * width * 4.0, 0.0,
        )  # fmt: skip
    for rows in (1, 128):
        for filtered in (False, True):
            yield (
                "sample", "sample filtered" if filtered else "sample", rows,
                lambda r=rows, f=filtered: sample_arguments(r, gpu, shape.vocabulary, f),
                rows * shape.vocabulary * 8.0, 0.0,
            )  # fmt: skip


def state_work(shape: ModelShape, only: str) -> Iterator[OpBenchmark]:
    for op, label, tokens, build, num_bytes, flops in plans(shape):
        if only not in label:
            continue
        copies = max(2, min(48, int(ROTATED_BYTES // max(num_bytes, 1)) + 1))
        sets = [build() for _ in range(copies)]
        kernel = next(k for k in OPS[op].kernels if k.supports(sets[0]) is None)
        calls: list[Callable[[], Any]] = [lambda a=a, k=kernel: k.run(a) for a in sets]
        yield OpBenchmark(label, shape.name, tokens, calls, num_bytes, flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--only", default="", help="ops whose label contains this")
    parser.add_argument("--record", type=Path, help="write a JSONL record")
    options = parser.parse_args()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    rows: list[Ceilings | Result] = [ceilings]
    line = "{:22} {:6} {:>6} {:>9} {:>8} {:>8} {:>8} {:>9} {:>7}"
    print(ceilings)  # noqa: T201
    print(line.format("op", "shape", "tokens", "us", "spread", "GB/s", "TFLOP/s", "floor us", "x"))  # noqa: T201
    for name in options.shape or sorted(SHAPES):
        for work in state_work(SHAPES[name], options.only):
            r = measure(work, ceilings)
            rows.append(r)
            cells = (r.median_us, r.spread_us, r.gbs, r.tflops, r.floor_us, r.ratio)
            print(line.format(r.op, r.shape, r.tokens, *cells), flush=True)  # noqa: T201
            if options.record:
                save(options.record, rows)
            work.calls.clear()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
