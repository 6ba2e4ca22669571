"""The operations of the model. `OPS` lists them; tests, benchmarks and `doctor` iterate over it.

`SHARES` are those of a rank that shares matrices with others. They have no cases: kernels leave
partial sums in another form than references, and only what these add up to can be compared, which
tests/ops/kernels/test_sharded_interpreter.py does.
"""

from dsv4.ops.attention.attention import OP as ATTENTION
from dsv4.ops.attention.index import SCORES as INDEX_SCORES
from dsv4.ops.attention.index import SELECT as INDEX_SELECT
from dsv4.ops.attention.query import INDEX as INDEX_QUERY
from dsv4.ops.attention.query import PREPARE as QUERY_PREPARE
from dsv4.ops.comm.own_experts import OP as OWN_EXPERTS
from dsv4.ops.comm.sharded import OPS as OPS_OF_SHARES
from dsv4.ops.core.context import EngineOps, forced_references
from dsv4.ops.core.op import AnyOp, Case, Kernel, Op
from dsv4.ops.gemm.embed import OP as EMBED
from dsv4.ops.gemm.grouped_linear import OP as GROUPED_LINEAR
from dsv4.ops.gemm.linear import OP as LINEAR
from dsv4.ops.kv.begin_step import OP as BEGIN_STEP
from dsv4.ops.kv.compress import OP as COMPRESS
from dsv4.ops.kv.kv_store import OP as KV_STORE
from dsv4.ops.kv.rope import OP as ROPE
from dsv4.ops.mhc.mix import BOUNDARY as MHC_BOUNDARY
from dsv4.ops.mhc.mix import HEAD as MHC_HEAD
from dsv4.ops.mhc.mix import PRE as MHC_PRE
from dsv4.ops.mhc.mix import UPDATE as MHC_UPDATE
from dsv4.ops.moe.experts import OP as EXPERTS
from dsv4.ops.moe.router import OP as ROUTER
from dsv4.ops.norm.rms_norm import OP as RMS_NORM
from dsv4.ops.sample.accept import OP as ACCEPT
from dsv4.ops.sample.draft_rows import OP as DRAFT_ROWS
from dsv4.ops.sample.sample import OP as SAMPLE
from dsv4.ops.sample.verify import OP as VERIFY

OPS: dict[str, AnyOp] = {
    op.name: op
    for op in (
        BEGIN_STEP, DRAFT_ROWS, EMBED, RMS_NORM, MHC_PRE, MHC_BOUNDARY, MHC_HEAD, MHC_UPDATE,
        LINEAR, GROUPED_LINEAR, ROPE, QUERY_PREPARE, KV_STORE, COMPRESS, INDEX_QUERY, INDEX_SCORES,
        INDEX_SELECT, ATTENTION, ROUTER, EXPERTS, OWN_EXPERTS, SAMPLE, ACCEPT, VERIFY,
    )
}  # fmt: skip
SHARES: dict[str, AnyOp] = {op.name: op for op in OPS_OF_SHARES}


def engine_ops(choice: str) -> EngineOps:
    """For an engine with `EngineConfig.ops` of this `choice`."""
    return EngineOps(forced_references(choice, OPS | SHARES))


__all__ = ["OPS", "SHARES", "AnyOp", "Case", "EngineOps", "Kernel", "Op", "engine_ops"]
