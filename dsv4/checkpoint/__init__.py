"""Reading checkpoints. `LAYOUTS` has one entry per layout; the first that matches names it.

Nothing here imports torch until tensors are read (`reader`).
"""

from dsv4.checkpoint.layouts import (
    Layout,
    compressed_tensors,
    modelopt_experts,
    modelopt_full,
    official,
    official_fp8,
    plain,
)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        official.LAYOUT,
        official_fp8.LAYOUT,
        modelopt_experts.LAYOUT,
        modelopt_full.LAYOUT,
        compressed_tensors.LAYOUT,
        plain.LAYOUT,
    )
}
