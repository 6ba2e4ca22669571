"""Router and experts of few rows on a CPU."""

import numpy as np
from torch import Tensor

from dsv4.formats.quantized import activations_of
from dsv4.ops.core.rows import ROW_TILE, matmul_rows
from dsv4.ops.cpu.arrays import Array, exp, fp32, tensor, tile
from dsv4.ops.gemm.linear import dense
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.moe.experts import Experts, experts_reference
from dsv4.ops.moe.placed import PlacedExperts
from dsv4.ops.moe.router import LEAST_TOTAL, Gate, router_reference


def router(x: Tensor, token_ids: Tensor, by: Gate) -> tuple[Tensor, Tensor]:
    if not 0 < x.shape[0] <= ROW_TILE or min(token_ids.tolist()) < 0:
        return router_reference(x, token_ids, by)
    logits = matmul_rows(tensor(tile(x.float().numpy())), by.gate).numpy()[: len(x)]
    scores = tensor(-np.abs(logits)).exp_().log1p_().numpy()
    scores += np.maximum(logits, fp32(0.0))
    tensor(scores).sqrt_()
    if by.table is not None:
        chosen = by.table.numpy().take(token_ids.numpy(), axis=0)
    else:
        assert by.bias is not None
        ranked = np.argsort(-(scores + by.bias.float().numpy()), axis=1, kind="stable")
        chosen = ranked[:, : by.num_chosen]
    chosen = np.sort(chosen, axis=1)
    weights = scores[np.arange(len(scores))[:, None], chosen]
    total = tensor(weights).sum(1, keepdim=True).numpy()
    total += fp32(LEAST_TOTAL)
    weights /= total
    weights *= fp32(by.scaling)
    return tensor(chosen), tensor(weights)


def experts(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    """One tile holds all rows, and every expert multiplies it: a row's result depends neither on
    its place in the tile nor on the others, so the rows that did not choose it are left alone."""
    (count, chosen), w13, w2 = experts.shape, by.w13, by.w2
    is_placed = isinstance(w13, PlacedExperts)
    if is_placed or not 0 < count <= ROW_TILE or by.shared_w2.shape != w2.shape[1:]:
        return experts_reference(x, experts, weights, by)
    visits: dict[int, list[int]] = {}
    pairs = count * chosen
    for place, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            visits.setdefault(expert, []).append(place)
    every = [(w13[e], w2[e], [(p, p // chosen) for p in places]) for e, places in visits.items()]
    every.append((by.shared_w13, by.shared_w2, [(pairs + row, row) for row in range(count)]))
    products = np.zeros((pairs + count, w13.shape[1]), dtype=np.float32)
    tiles: dict[str, Tensor] = {}
    for first, _, places in every:
        width = activations_of(first)
        if width not in tiles:
            tiles[width] = tensor(tile(rounded(x, width).float().numpy()))
        product = matmul_rows(tiles[width], dense(first)).numpy()
        for place, row in places:
            products[place] = product[row]
    z = tensor(_activation(products, weights.numpy().reshape(-1, 1), by.limit)).to(x.dtype)
    parts = np.zeros((pairs + count, x.shape[1]), dtype=np.float32)
    inputs: dict[str, Array] = {}
    for _, second, places in every:
        width = activations_of(second)
        if width not in inputs:
            inputs[width] = rounded(z, width).float().numpy()
        padded = np.zeros((ROW_TILE, w2.shape[2]), dtype=np.float32)
        for place, row in places:
            padded[row] = inputs[width][place]
        product = matmul_rows(tensor(padded), dense(second)).numpy()
        for place, row in places:
            parts[place] = product[row]
    each = parts[:pairs].reshape(count, chosen, -1)
    total = fp32(0.0) + each[:, 0]
    for number in range(1, chosen):
        total = total + each[:, number]
    return tensor(total + parts[pairs:]).to(x.dtype)


def _activation(products: Array, weights: Array, limit: float) -> Array:
    """`silu(gate) * up`, clamped; `weights` multiply the first rows, the last ones have none."""
    inner = products.shape[1] // 2
    z = np.minimum(products[:, :inner], fp32(limit))
    shrink = exp(-z)
    shrink += fp32(1.0)
    z /= shrink
    up = np.minimum(products[:, inner:], fp32(limit))
    z *= np.maximum(up, fp32(-limit), out=up)
    z[: len(weights)] *= weights
    return z
