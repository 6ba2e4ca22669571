"""Muon for the matrices inside the blocks, Adam for everything else.

Muon replaces a matrix's momentum by the nearest matrix with equal singular values, found by five
Newton-Schulz steps in bf16. Matrices of the same shape are processed as one stack.
"""

from collections import defaultdict

import torch
from torch import Tensor

from training.shape import Plan

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(stack: Tensor) -> Tensor:
    """`[n, rows, cols]` -> matrices whose singular values are near 1."""
    x = stack.bfloat16() if stack.is_cuda else stack
    turned = x.shape[1] > x.shape[2]
    if turned:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.transpose(1, 2)
        x = _A * x + (_B * square + _C * (square @ square)) @ x
    return (x.transpose(1, 2) if turned else x).to(stack.dtype)


def is_matrix(name: str) -> bool:
    """Whether Muon trains it: projections, not embeddings, routers or mixing."""
    if name.endswith(("embed.weight", "head.weight", ".gate.weight", "weights_proj.weight")):
        return False
    return name.endswith((".w13", ".w2")) or (name.endswith(".weight") and "norm" not in name)


def _share(name: str) -> float:
    """Share of Adam's learning rate: in the wide rows of mixing, many small steps add up."""
    if name in ("embed.weight", "head.weight") or name.endswith(("ape", "detectors")):
        return 1.0
    return 0.1 if name.endswith("_fn") else 0.3


class Optimizer:
    def __init__(self, table: dict[str, Tensor], plan: Plan, o_groups: int) -> None:
        trained = {n: t for n, t in table.items() if t.requires_grad}
        self.plan = plan
        self._matrices = {n: t for n, t in trained.items() if is_matrix(n)}
        self._momentum = {n: torch.zeros_like(t) for n, t in self._matrices.items()}
        self._o_groups = o_groups
        others = {n: t for n, t in trained.items() if not is_matrix(n)}
        shares: dict[float, list[Tensor]] = defaultdict(list)
        for name, weight in others.items():
            shares[_share(name)].append(weight)
        groups = [{"params": params, "share": share} for share, params in shares.items()]
        on_gpu = any(t.is_cuda for t in others.values())
        self._adam = torch.optim.AdamW(
            groups, lr=plan.adam_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=on_gpu
        )
        self._others = list(others.values())

    def _parts(self, name: str, matrix: Tensor) -> Tensor:
        """The matrices to orthogonalise separately, `[n, rows, cols]`."""
        if name.endswith("w13"):
            return matrix.reshape(-1, matrix.shape[-2] // 2, matrix.shape[-1])
        if name.endswith("wo_a.weight"):
            return matrix.unflatten(0, (self._o_groups, -1))
        return matrix.reshape(-1, *matrix.shape[-2:])

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """`rate`: the schedule's factor on every learning rate."""
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.plan.adam_rate * group["share"] * rate
        self._adam.step()
        self._adam.zero_grad()
        self._muon(self.plan.muon_rate * rate)

    def _muon(self, rate: float) -> None:
        names = [n for n, t in self._matrices.items() if t.grad is not None]
        grads = [self._matrices[n].grad for n in names]
        moments = [self._momentum[n] for n in names]
        torch._foreach_lerp_(moments, grads, 0.05)  # type: ignore[arg-type]
        looked_ahead = torch._foreach_lerp(grads, moments, 0.95)  # type: ignore[arg-type]
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        parts = [self._parts(n, u) for n, u in zip(names, looked_ahead, strict=True)]
        for place, part in enumerate(parts):
            by_shape[tuple(part.shape[1:])].append(place)
        for (rows, cols), places in by_shape.items():
            stack = orthogonalise(torch.cat([parts[place] for place in places]))
            size = rate * max(1.0, rows / cols) ** 0.5
            pieces = stack.split([parts[place].shape[0] for place in places])
            weights = [self._matrices[names[place]] for place in places]
            torch._foreach_mul_(weights, 1.0 - 0.01 * rate)
            updates = [p.reshape(w.shape) for p, w in zip(pieces, weights, strict=True)]
            torch._foreach_add_(weights, updates, alpha=-size)
        for name in names:
            self._matrices[name].grad = None
