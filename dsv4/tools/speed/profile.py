"""The kernels of one step, by family, timed on the GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# kernels grouped into families for the table of shares
FAMILIES = {
    "experts": (
        "_up_kernel", "_down_kernel", "_combine_kernel", "_group_kernel", "_count_kernel",
        "_place_kernel", "_activate_kernel", "_own_kernel", "up_stream", "down_stream",
    ),
    "router": ("_gate_kernel", "_top_k_kernel"),
    "linear": (
        "_linear_kernel", "_expand_kernel", "_few_rows_kernel", "_many_rows_kernel",
        "_quantize_kernel", "_norm_quantize_kernel", "linear_stream",
    ),
    "mhc": (
        "update_kernel", "few_update_kernel", "_mix_kernel", "comb_kernel", "_stage_end_kernel",
    ),
    "attention": (
        "_loop_kernel", "_scaled_kernel", "_merge_kernel", "_split_kernel",
        "_weights_kernel", "_values_kernel", "_unpack_kernel", "_prefill_kernel",
    ),
    "index": (
        "_scores_kernel", "_select_kernel", "_peaks_kernel", "_select_chunk_kernel",
        "_index_kernel",
    ),
    "state": (
        "_kv_store_kernel", "_close_kernel", "_append_kernel", "_prepare_kernel",
        "_rms_norm_kernel", "_state_kernel", "_queries_kernel", "_pages_kernel", "_begin_kernel",
        "_rows_kernel",
    ),
    "sample": (
        "_stats_kernel", "_candidates_kernel", "_filter_kernel", "_draw_kernel", "_best_kernel",
        "_accept_kernel", "_embed_kernel", "_verify_kernel",
    ),
    "exchange": (
        "gather_kernel", "rows_kernel", "ranges_kernel", "pairs_kernel", "send_kernel",
        "receive_kernel",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Kernels of one step, timed on the GPU."""

    num_kernels: int
    share_us: dict[str, float]  # by family; kernels overlap, so the sum may exceed the step


def profile_step(step: Callable[[], object], device: torch.device) -> Profile:
    if device.type == "cpu":
        step()
        return Profile(0, {})
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    shares: dict[str, float] = {}
    count = 0
    for event in seen.events():
        if event.device_type.name == "CUDA" and not event.name.startswith("Mem"):
            count += 1
            family = family_of(event.name)
            shares[family] = shares.get(family, 0.0) + event.time_range.elapsed_us()
    return Profile(count, dict(sorted(shares.items(), key=lambda item: -item[1])))


def family_of(kernel: str) -> str:
    for family, names in FAMILIES.items():
        if kernel in names:
            return family
    return "other"
