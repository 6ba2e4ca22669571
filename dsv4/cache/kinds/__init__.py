"""One class per layer kind: the tensors of its state.

`pools` names its paged tensors; `carried` is what of a slot still matters at a 128-token
boundary, `[slots, rows, width]` each: what a cached prefix must keep beside its pages. `kept` is
where it is kept, `[prefixes, rows, width]`, in the same order.
"""

from dsv4.cache.kinds.csa import CsaState
from dsv4.cache.kinds.hca import HcaState
from dsv4.cache.kinds.swa import SwaState
from dsv4.config import LayerKind

LayerState = SwaState | CsaState | HcaState

KINDS: dict[LayerKind, type[SwaState] | type[CsaState] | type[HcaState]] = {
    "swa": SwaState,
    "csa": CsaState,
    "hca": HcaState,
}

__all__ = ["KINDS", "CsaState", "HcaState", "LayerState", "SwaState"]
