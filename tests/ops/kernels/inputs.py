"""Inputs that need a GPU's speed: model-sized cases, and batches whose rows must agree."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import fp8
from dsv4.formats.quantized import Fp8BlockTensor
from dsv4.ops import OPS, Op
from dsv4.ops.core.arguments import copied
from dsv4.ops.core.op import Arguments
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.router import Gate
from dsv4.tools.bench_ops import SHAPES, random_fp4, random_routing

BATCHES = (1, 2, 8, 9, 16, 32, 33, 64, 65, 128, 300, 1024)


def on_gpu(arguments: Arguments) -> Arguments:
    moved: Arguments = copied(arguments, lambda value: value.cuda())
    return moved


def relative_error(found: Tensor, wanted: Tensor) -> float:
    a, b = found.double(), wanted.double()
    if a.numel() == 0:
        return 0.0
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def gpu_cases() -> Iterator[tuple[str, Arguments, Op, float]]:
    """(name, arguments, op, relative tolerance): what kernels support, at all batch shapes."""
    for name in ("linear", "grouped_linear", "embed", "router", "experts"):
        for case in OPS[name].cases():
            arguments = on_gpu(case.build(torch.Generator().manual_seed(3)))
            empty = arguments["token_ids" if name == "embed" else "x"].numel() == 0
            if not empty and OPS[name].kernels[0].supports(arguments) is None:
                yield f"{name} {case.name}", arguments, OPS[name], 4e-3
    for rows in (1, 7, 16, 31, 64, 128, 513):
        yield f"linear sizes {rows}", linear_arguments(rows, 2048), OPS["linear"], 4e-3
        yield f"experts sizes {rows}", experts_arguments(rows), OPS["experts"], 6e-3
        for hashed in (False, True):
            arguments = router_arguments(rows, hashed)
            yield f"router sizes {rows} {hashed}", arguments, OPS["router"], 1e-5


def linear_arguments(rows: int, k: int) -> Arguments:
    torch.manual_seed(5)
    values = torch.randn(320, k, device="cuda")
    weights: list[Any] = [random_fp4(1024, k), random_fp4(200, k), values.bfloat16()]
    weights += [Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32)]
    weights += [Fp8BlockTensor(*fp8.quantize_tiles(values, 128, power_of_two=False), 128)]
    weights += [Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128)]
    x = torch.randn(rows, k, device="cuda").bfloat16()
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.float32]
    dtypes += [torch.float32]
    return {"x": x, "weights": weights, "out_dtypes": dtypes}


def experts_arguments(
    rows: int, skewed: bool = False, size: int = 512, inner: int = 384
) -> Arguments:
    torch.manual_seed(6)
    count, chosen = 24, 6
    experts = torch.rand(rows, count, device="cuda").topk(chosen, dim=1).indices
    if skewed:  # every token at experts 0 to 5, most experts idle
        experts = torch.arange(chosen, device="cuda").repeat(rows, 1)
    return {
        "x": torch.randn(rows, size, device="cuda").bfloat16(),
        "experts": experts.sort(1).values.contiguous(),
        "weights": torch.rand(rows, chosen, device="cuda"),
        "by": Experts(
            random_fp4(2 * inner, size, count, paired=True),
            random_fp4(size, inner, count),
            random_fp4(2 * inner, size, paired=True),
            random_fp4(size, inner),
            10.0,
        ),
    }


def router_arguments(rows: int, hashed: bool) -> Arguments:
    torch.manual_seed(7)
    shape = SHAPES["flash"]
    table = random_routing(shape, 50)[0]
    return {
        "x": torch.randn(rows, shape.hidden, device="cuda").bfloat16(),
        "by": Gate(
            gate=(torch.randn(256, shape.hidden, device="cuda") * 0.02).bfloat16(),
            bias=None if hashed else torch.randn(256, device="cuda") * 0.1,
            table=table if hashed else None,
            num_chosen=6,
            scaling=1.5,
        ),
        "token_ids": torch.randint(0, 50, (rows,), device="cuda"),
    }


ROWS = {"linear": ("x",), "experts": ("x", "experts", "weights"), "router": ("x", "token_ids")}


def row_invariance(most: int = 8192) -> Iterator[tuple[str, bool]]:
    """Row i of a large batch against the row in smaller ones, bit for bit."""
    makers: dict[str, Callable[[], Arguments]] = {
        "linear": lambda: linear_arguments(most, 4096),
        "experts": lambda: experts_arguments(most),
        "experts skewed": lambda: experts_arguments(most, skewed=True),
        "experts with ranges of K": lambda: experts_arguments(most, size=1024, inner=1024),
        "router": lambda: router_arguments(most, False),
        "router hashed": lambda: router_arguments(most, True),
    }
    for label, make in makers.items():
        name = label.split()[0]
        arguments = make()
        whole = results(OPS[name].kernels[0].run(arguments))
        for count in BATCHES:
            start = min(37, most - count)
            few = dict(arguments)
            for key in ROWS[name]:
                few[key] = arguments[key][start : start + count].contiguous()
            part = results(OPS[name].kernels[0].run(few))
            pairs = list(zip(part, whole, strict=True))
            wrong = [i for i, (a, b) in enumerate(pairs) if not a.equal(b[start : start + count])]
            yield f"{label}: {count} rows of {most}, results {wrong} differ", not wrong


def results(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def mx_and_nvfp4_experts(
    tokens: int, size: int, inner: int, count: int, chosen: int, device: str
) -> Iterator[dict[str, Any]]:
    """The same experts kept as MXFP4, and as the NVFP4 that says the same exactly."""
    from dsv4.ops.gemm.weights.repack import mxfp4_as_nvfp4
    from dsv4.ops.gemm.weights.tiled import random_mxfp4, tile_mxfp4, tile_nvfp4

    generator = torch.Generator().manual_seed(tokens)
    stacks = {
        "w13": random_mxfp4(2 * inner, size, generator, count=count),
        "w2": random_mxfp4(size, inner, generator, count=count),
        "shared_w13": random_mxfp4(2 * inner, size, generator),
        "shared_w2": random_mxfp4(size, inner, generator),
    }
    picks = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
    given = {
        "x": torch.randn(tokens, size, generator=generator).bfloat16().to(device),
        "experts": torch.stack(picks).sort(1).values.to(device),
        "weights": torch.rand(tokens, chosen, generator=generator).to(device),
    }
    for tiled in (tile_mxfp4, lambda w, paired: tile_nvfp4(mxfp4_as_nvfp4(w), paired=paired)):
        made = {name: tiled(w, paired="w13" in name).to(device) for name, w in stacks.items()}
        yield {**given, "by": Experts(**made, limit=10.0)}
