"""mHC: several residual streams, mixed with coefficients computed from the streams themselves.

    mhc_pre        coefficients of one site, collapse of the streams, RMS norm
    mhc_boundary   the update after one half-block, then mhc_pre of the next site
    mhc_head       the update after the last half-block, then the final collapse and norm

The boundary is one op so that a kernel reads and writes the streams once between two half-blocks.
A half-block's result `y` may come as partial sums. Streams are `[tokens, streams, size]` in the
activation dtype; coefficients stay fp32; the collapsed row is rounded to the activation dtype
before its norm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import matmul_rows, pad_matrix, sigmoid, softmax
from dsv4.ops.core.op import AnyOp, Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.norm.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class MixSite:
    """Parameters (fp32) of one site where streams are collapsed, and the norm after it."""

    fn: Tensor  # [(2 + streams) * streams, streams * size]; head: [streams, streams * size]
    base: Tensor  # [rows of fn]
    scale: Tensor  # [3]; head: [1]
    norm: Tensor  # [size]
    eps: float  # of both norms
    hc_eps: float
    sinkhorn_iters: int

    @cached_property
    def row_scale(self) -> Tensor:
        """`scale` per row of fn: pre, post and the mixing matrix have one each."""
        n = self.fn.shape[1] // self.norm.shape[0]
        counts = (n, n, n * n)[: len(self.scale)]
        return torch.cat([s.expand(c) for s, c in zip(self.scale, counts, strict=True)])

    @cached_property
    def arrays(self) -> tuple[Tensor, Any, Any, Any]:
        """On a CPU: fn padded and transposed, and row_scale, base and norm for numpy."""
        norm: Any = self.norm.float().numpy()
        return pad_matrix(self.fn).t(), self.row_scale.numpy(), self.base.numpy(), norm


@dataclass(frozen=True, slots=True)
class Update:
    """A half-block's result, and how to spread it over the streams."""

    y: Tensor | PartialSums  # [tokens, size]
    post: Tensor  # [tokens, streams] fp32
    comb: Tensor  # [tokens, source stream, destination stream] fp32


@dataclass(frozen=True, slots=True)
class Residual:
    """The streams and their pending update, if any."""

    streams: Tensor  # [tokens, streams, size]
    update: Update | None = None


def _mixing_logits(streams: Tensor, site: MixSite) -> Tensor:
    """`fn . v / rms(v) * scale + base`, with one RMS over all streams, `[tokens, rows]`."""
    flat = streams.flatten(1).float()
    mean = flat.square().sum(-1, keepdim=True).div_(flat.shape[1])
    inverse_rms = mean.add_(site.eps).rsqrt_()
    return (matmul_rows(flat, site.fn) * inverse_rms).mul_(site.row_scale).add_(site.base)


def sinkhorn(matrix: Tensor, eps: float, iters: int) -> Tensor:
    """Normalise rows and columns alternately; `[..., source, destination]`."""
    least = matrix.new_tensor(eps)  # adding a Python number takes twice as long
    matrix = softmax(matrix, dim=-1) + least
    matrix /= matrix.sum(-2, keepdim=True).add_(least)
    for _ in range(iters - 1):
        matrix /= matrix.sum(-1, keepdim=True).add_(least)
        matrix /= matrix.sum(-2, keepdim=True).add_(least)
    return matrix


def _collapse(streams: Tensor, weights: Tensor, site: MixSite) -> Tensor:
    mixed = (streams.float() * weights.unsqueeze(-1)).sum(1).to(streams.dtype)
    return rms_norm_reference(mixed, site.norm, site.eps)


def mhc_pre_reference(streams: Tensor, site: MixSite) -> tuple[Tensor, Tensor, Tensor]:
    n = streams.shape[1]
    logits = _mixing_logits(streams, site)
    pre, post = sigmoid(logits[:, : 2 * n]).chunk(2, dim=1)
    comb = sinkhorn(logits[:, 2 * n :].view(-1, n, n), site.hc_eps, site.sinkhorn_iters)
    return _collapse(streams, pre + site.hc_eps, site), 2 * post, comb


def mhc_update_reference(streams: Tensor, update: Update) -> Tensor:
    """`X_k <- q_k y + sum_j M[j, k] X_j`: the first index of M is the source stream."""
    y = update.y.total() if isinstance(update.y, PartialSums) else update.y
    mixed = (update.comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (update.post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)


def mhc_boundary_reference(
    streams: Tensor, update: Update, site: MixSite
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = mhc_update_reference(streams, update)
    return (streams, *mhc_pre_reference(streams, site))


def mhc_head_reference(streams: Tensor, update: Update, site: MixSite) -> Tensor:
    streams = mhc_update_reference(streams, update)
    weights = sigmoid(_mixing_logits(streams, site)) + site.hc_eps
    return _collapse(streams, weights, site)


def _random_site(generator: torch.Generator, n: int, size: int, head: bool) -> MixSite:
    rows = n if head else (2 + n) * n
    return MixSite(
        fn=torch.randn(rows, n * size, generator=generator) * 0.05,
        base=torch.randn(rows, generator=generator),
        scale=torch.rand(1 if head else 3, generator=generator) + 0.5,
        norm=torch.rand(size, generator=generator) + 0.5,
        eps=1e-6,
        hc_eps=1e-6,
        sinkhorn_iters=20,
    )


def _random_parts(
    generator: torch.Generator, shape: tuple[int, int, int, int], factors: int, dtype: torch.dtype
) -> PartialSums:
    factor = torch.rand(factors, generator=generator) + 0.5 if factors else None
    return PartialSums(torch.randn(shape, generator=generator), factor, dtype)


def _cases(with_update: bool, head: bool) -> Iterable[Case]:
    def build(
        tokens: int,
        n: int,
        size: int,
        dtype: torch.dtype,
        scale: float,
        parts: tuple[int, int, int] | None = None,  # groups, ranges, factors
    ) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            streams = (torch.randn(tokens, n, size, generator=generator) * scale).to(dtype)
            arguments: Arguments = {"streams": streams}
            if with_update:
                y: Tensor | PartialSums = torch.randn(tokens, size, generator=generator).to(dtype)
                if parts is not None:
                    shape = (parts[0], parts[1], tokens, size)
                    y = _random_parts(generator, shape, parts[2], dtype)
                post = torch.rand(tokens, n, generator=generator) * 2
                comb = torch.randn(tokens, n, n, generator=generator)
                arguments["update"] = Update(y, post, sinkhorn(comb, 1e-6, 20))
            return {**arguments, "site": _random_site(generator, n, size, head)}

        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        name = f"{tokens}x{n}x{size} {dtype} x{scale}" + (f" parts {parts}" if parts else "")
        return Case(name, make, tolerance, tolerance, small=size < 1000)

    for dtype in (torch.float32, torch.bfloat16):
        yield build(3, 4, 64, dtype, 1.0)
        yield build(1, 4, 4096, dtype, 1.0)
        yield build(5, 4, 33, dtype, 200.0)
        yield build(0, 4, 64, dtype, 1.0)
        if with_update:
            yield build(1, 4, 64, dtype, 1.0, (1, 8, 1))
            yield build(1, 4, 4096, dtype, 1.0, (7, 2, 0))
            yield build(1, 4, 33, dtype, 1.0, (3, 1, 3))


def pre_cases() -> Iterable[Case]:
    return _cases(with_update=False, head=False)


def boundary_cases() -> Iterable[Case]:
    return _cases(with_update=True, head=False)


def update_cases() -> Iterable[Case]:
    def without_site(case: Case) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            return {name: a for name, a in case.build(generator).items() if name != "site"}

        return replace(case, build=make)

    return map(without_site, boundary_cases())


def head_cases() -> Iterable[Case]:
    return _cases(with_update=True, head=True)


KERNELS, ON_CPU = (Kernel("dsv4.ops.mhc.mix_triton"),), "dsv4.ops.cpu.mix"
PRE = Op("mhc_pre", mhc_pre_reference, pre_cases, KERNELS, on_cpu=ON_CPU)
BOUNDARY = Op("mhc_boundary", mhc_boundary_reference, boundary_cases, KERNELS, on_cpu=ON_CPU)


def _stage_end(streams: Tensor, update: Update) -> Tensor:
    return mhc_update_reference(streams, update)  # looked up here: `bench quality` replaces it


UPDATE = Op(
    "mhc_update", _stage_end, update_cases, kernels=(Kernel("dsv4.ops.mhc.stage_end_triton"),)
)
HEAD = Op("mhc_head", mhc_head_reference, head_cases, KERNELS, on_cpu=ON_CPU)


def _check(op: AnyOp, streams: Tensor, site: MixSite, head: bool) -> None:
    check_shape(op.name, "streams", streams, "tokens", "streams", "size")
    n, size = streams.shape[1:]
    rows = n if head else (2 + n) * n
    check_shape(op.name, "fn", site.fn, rows, n * size)
    check_shape(op.name, "base", site.base, rows)
    check_shape(op.name, "scale", site.scale, 1 if head else 3)
    check_shape(op.name, "norm", site.norm, size)
    check(
        site.fn.dtype == torch.float32,
        op.name,
        lambda: f"mixing parameters are {site.fn.dtype}, expected float32",
    )


def _check_update(op: AnyOp, streams: Tensor, update: Update) -> None:
    tokens, n, size = streams.shape
    check_shape(op.name, "y", update.y, tokens, size)
    check_shape(op.name, "post", update.post, tokens, n)
    check_shape(op.name, "comb", update.comb, tokens, n, n)


def mhc_pre(streams: Tensor, site: MixSite) -> tuple[Tensor, Tensor, Tensor]:
    """-> normalised input `[tokens, size]`, post `[tokens, n]`, comb `[tokens, n, n]`."""
    _check(PRE, streams, site, head=False)
    return PRE(streams.device, streams=streams, site=site)


def mhc_update(streams: Tensor, update: Update) -> Tensor:
    """-> updated streams: the first half of `mhc_boundary`, at the end of a pipeline stage."""
    _check_update(UPDATE, streams, update)
    return UPDATE(streams.device, streams=streams, update=update)


def mhc_boundary(
    streams: Tensor, update: Update, site: MixSite
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> updated streams, then the results of `mhc_pre`."""
    _check(BOUNDARY, streams, site, head=False)
    _check_update(BOUNDARY, streams, update)
    return BOUNDARY(streams.device, streams=streams, update=update, site=site)


def mhc_head(streams: Tensor, update: Update, site: MixSite) -> Tensor:
    """-> the normalised input row of the output head, `[tokens, size]`."""
    _check(HEAD, streams, site, head=True)
    _check_update(HEAD, streams, update)
    return HEAD(streams.device, streams=streams, update=update, site=site)


def collapse(residual: Residual, site: MixSite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> updated streams, their collapsed and normalised row, post, comb."""
    streams, update = residual.streams, residual.update
    if update is None:
        return (streams, *mhc_pre(streams, site))
    return mhc_boundary(streams, update, site)
