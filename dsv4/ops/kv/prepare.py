"""What a layer does with its projections before queries are made, as one launch where possible.

Parts: `rms_norm` of the latent, `kv_store` of the window key, `compress` once or twice. They read
different projections and write to different places, so their order does not matter. Where the
matrices behind the latent take activations of few bits, it is quantised where it is normalised:
those matrices belong to the fusion, and their results come back.
"""

from dsv4.ops.op import Fusion, Kernel

STATE_PREPARE = Fusion(("rms_norm", "kv_store", "compress"), Kernel("dsv4.ops.kv.prepare_triton"))

_SCALED = Kernel("dsv4.ops.kv.queries_scaled_triton")
STATE_QUERIES = Fusion((*STATE_PREPARE.parts, "linear"), _SCALED)
NORM_QUERIES = Fusion(("rms_norm", "linear"), _SCALED)
