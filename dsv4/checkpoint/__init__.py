"""Reading checkpoints. `LAYOUTS` has one entry per layout; the first match names the checkpoint's.

Nothing here imports torch until tensors are read (`reader`).
"""

from dsv4.checkpoint.layouts import (
    Layout,
    compressed_tensors,
    modelopt,
    modelopt_experts,
    modelopt_full,
    official,
    official_fp8,
    plain,
    transformers_fp8,
)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        official.LAYOUT,
        official_fp8.LAYOUT,
        modelopt_experts.LAYOUT,
        modelopt_full.LAYOUT,
        transformers_fp8.LAYOUT,
        compressed_tensors.LAYOUT,
        modelopt.LAYOUT,
        plain.LAYOUT,
    )
}
