"""Router and experts of few rows on a CPU."""

import numpy as np
import torch
from torch import Tensor

from dsv4.formats.quantized import UnpackedTensor, Weight, activations_of
from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.cpu.arrays import Array, exp, fp32, tensor, tile
from dsv4.ops.cpu.products import as_multiplied, multiply
from dsv4.ops.gemm.linear import dense
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.moe.experts import Experts, as_stored, experts_reference
from dsv4.ops.moe.placed import PlacedExperts
from dsv4.ops.moe.router import LEAST_TOTAL, Gate, router_reference

ZERO, ONE = fp32(0.0), fp32(1.0)


def router(x: Tensor, token_ids: Tensor, by: Gate) -> tuple[Tensor, Tensor]:
    count = x.shape[0]
    if not 0 < count <= ROW_TILE or min(token_ids.tolist()) < 0:
        return router_reference(x, token_ids, by)
    return route(tensor(tile(x.float().numpy())), count, token_ids, by)


def route(rows: Tensor, count: int, token_ids: Tensor, by: Gate) -> tuple[Tensor, Tensor]:
    """`router` of the first rows of a tile."""
    logits = multiply(rows, by.gate).numpy()[:count]
    scores = np.abs(logits)
    np.negative(scores, scores)
    held = tensor(scores)
    held.exp_().log1p_()
    scores += np.maximum(logits, ZERO)
    held.sqrt_()
    if by.table is not None:
        chosen = by.table.numpy().take(token_ids.numpy(), axis=0)
    else:
        assert by.bias is not None
        ranked = -(scores + by.bias.float().numpy())
        chosen = ranked.argsort(axis=1, kind="stable")[:, : by.num_chosen]
    chosen.sort(axis=1)
    weights = np.take_along_axis(scores, chosen, 1) if count > 1 else scores.take(chosen)
    total = tensor(weights).sum(1, keepdim=True).numpy()
    total += fp32(LEAST_TOTAL)
    weights /= total
    weights *= fp32(by.scaling)
    return tensor(chosen), tensor(weights)


def experts(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    """One tile holds all rows, and every expert multiplies it: a row's result depends neither on
    its place in the tile nor on other rows, so rows that did not choose the expert can stay."""
    count, w13, w2 = experts.shape[0], by.w13, by.w2
    is_placed = isinstance(w13, PlacedExperts)
    if is_placed or not 0 < count <= ROW_TILE or by.shared_w2.shape != w2.shape[1:]:
        return experts_reference(x, experts, weights, by)
    tiles = {width: as_multiplied(x, width) for width in _widths(w13, by.shared_w13)}
    return tensor(sum_of_experts(tiles, experts, weights, by, x.dtype)).to(x.dtype)


def sum_of_experts(
    tiles: dict[str, Tensor], experts: Tensor, weights: Tensor, by: Experts, dtype: torch.dtype
) -> Array:
    """fp32 `[rows, size]`; `tiles`: the input by activation width."""
    (count, chosen), w13, w2 = experts.shape, by.w13, by.w2
    visits: dict[int, list[int]] = {}
    pairs = count * chosen
    for place, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            visits.setdefault(expert, []).append(place)
    # (expert, [(place among the results, row), ...]); -1: the shared expert
    every = [(expert, [(p, p // chosen) for p in places]) for expert, places in visits.items()]
    every.append((-1, [(pairs + row, row) for row in range(count)]))
    products = np.zeros((pairs + count, w13.shape[1]), dtype=np.float32)
    for expert, places in every:
        stack = by.shared_w13 if expert < 0 else w13
        product = _product(tiles[activations_of(stack)], stack, expert, dtype)
        for place, row in places:
            products[place] = product[row]
    z = tensor(_activation(products, weights.numpy().reshape(-1, 1), by.limit)).to(dtype)
    expert_sums = np.zeros((pairs + count, w2.shape[1]), dtype=np.float32)
    inputs = {
        width: rounded(z, width).float().numpy()  # type: ignore[arg-type]
        for width in _widths(w2, by.shared_w2)
    }
    padded = np.zeros((ROW_TILE, w2.shape[2]), dtype=np.float32)
    held = tensor(padded)
    for expert, places in every:
        stack = by.shared_w2 if expert < 0 else w2
        rows = inputs[activations_of(stack)]
        for place, row in places:  # other experts' rows stay: their results are not read
            padded[row] = rows[place]
        product = _product(held, stack, expert, dtype)
        for place, row in places:
            expert_sums[place] = product[row]
    each = expert_sums[:pairs].reshape(count, chosen, -1)
    total = each[:, 0]
    for number in range(1, chosen):
        total = total + each[:, number]
    result: Array = total + expert_sums[pairs:]
    return result


def _widths(*stacks: Weight) -> set[str]:
    return {activations_of(stack) for stack in stacks}


def _product(rows: Tensor, stack: Weight, expert: int, dtype: torch.dtype) -> Array:
    product = multiply(rows, _matrix(stack, expert))
    return as_stored(product, activations_of(stack), dtype).numpy()


def _matrix(stack: Weight, expert: int) -> Tensor:
    """An expert's matrix in fp32; -1: the stack is the matrix."""
    if isinstance(stack, UnpackedTensor):
        stack = stack.values
    return dense(stack if expert < 0 else stack[expert])


def _activation(products: Array, weights: Array, limit: float) -> Array:
    """`silu(gate) * up`, clamped; `weights` multiply the first rows, the last ones have none."""
    inner = products.shape[1] // 2
    np.minimum(products, fp32(limit), out=products)
    z, up = products[:, :inner], products[:, inner:]
    shrink = exp(-z)
    shrink += ONE
    np.divide(z, shrink, shrink)
    np.maximum(up, fp32(-limit), out=up)
    shrink *= up
    shrink[: len(weights)] *= weights
    return shrink
