# mypy: ignore-errors
"""`router` and `experts` for one token: the gate, then experts whose programs choose themselves.

Choosing takes a program about a microsecond and spares a launch; the result comes in parts, whose
sum has the bits of the two ops.
"""

import torch
import triton

from dsv4.ops.moe import experts_triton, router_triton
from dsv4.ops.moe.router_triton import gate_logits
from dsv4.ops.moe.shared_triton import is_apart
from dsv4.ops.parts import Parts


def supports(router, experts) -> str | None:
    if router["x"].shape[0] != 1:
        return "more than one token: choosing is a kernel of its own"
    if is_apart(experts["shared_w13"]):
        return "a shared expert in another format"
    return router_triton.supports(**router) or experts_triton.weights_reason(
        router["x"], experts["w13"], experts["w2"], experts["shared_w13"], experts["shared_w2"]
    )


def run(router, experts) -> Parts:
    x, gate, ids = router["x"], router["gate"], router["token_ids"]
    logits, ranges = gate_logits(x, gate)
    hashed = router["table"] is not None
    select = {
        "logits": logits,
        "bias": ids if hashed else router["bias"],  # one of them is not read
        "table": router["table"] if hashed else ids,
        "token_ids": ids,
        "scaling": router["scaling"],
        "RANGES": ranges,
        "CHOSEN": router["num_chosen"],
        "HASHED": hashed,
        "BE": triton.next_power_of_2(gate.shape[0]),
    }
    chosen = torch.empty(1, router["num_chosen"], dtype=torch.int64, device=x.device)
    parts = experts_triton.launch(x, chosen, x, **experts, select=select, parts_only=True)
    return Parts(parts.movedim(0, 2), None, x.dtype)
