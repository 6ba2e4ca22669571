"""Observes a step: assigns every op call its layer and station."""

from collections.abc import Callable
from typing import Any

from dsv4.errors import KernelError
from dsv4.ops.core.arguments import copied
from dsv4.ops.core.op import AnyOp, Arguments
from dsv4.tools.doctor.plain.stations import STATIONS, OpCall

_MUTABLE = ("key", "block", "to")  # arguments that later calls change
# the station of a call: by op and the number of its earlier calls in the half-layer
_Half = dict[str, tuple[str, ...]]
_ATTENTION: _Half = {
    "linear": ("project", "query", "output"),
    "kv_store": ("window_key",),
    "rms_norm": ("latent_norm",),
    "compress": ("entries", "index_keys"),
    "index_query": ("index_query",),
    "index_scores": ("index_scores",),
    "index_select": ("index_select",),
    "query_prepare": ("query_prepare",),
    "attention": ("attention",),
    "grouped_linear": ("output_groups",),
}
_FFN: _Half = {"router": ("router",), "experts": ("experts",), "mhc_head": ("head_mix",)}
_HEAD: _Half = {"linear": ("head",)}


Consumer = Callable[[OpCall], None]


class Tracer:
    """An observer of ops (`dsv4.ops.core.op.observe`) that passes each call to `consumer`."""

    def __init__(self, consumer: Consumer, *, keep_state: bool = True) -> None:
        self._consumer = consumer
        self._keep_state = keep_state
        self.unplaced: set[str] = set()  # ops called where the layer has no such station
        self.begin_step()

    def begin_step(self) -> None:
        self._layer = -1
        self._half: _Half = {}
        self._seen: dict[str, int] = {}

    def __call__(self, op: AnyOp, arguments: Arguments, run: Callable[[], Any]) -> Any:
        name = self._place(op.name)
        if name is None:
            self.unplaced.add(op.name)
            return run()
        before = dict(arguments)
        if self._keep_state:
            before |= {key: copied(arguments[key]) for key in _MUTABLE if key in arguments}
        try:
            result = run()
        except Exception as error:
            where = f"{op.name} ({name}) in layer {max(self._layer, 0)}"
            raise KernelError(f"{where} failed: {error}") from error
        self._consumer(OpCall(max(self._layer, 0), STATIONS[name], op, before, arguments, result))
        return result

    def _place(self, op: str) -> str | None:
        if op == "embed":
            return "embed"
        if op in ("mhc_pre", "mhc_boundary"):
            return self._enter(from_ffn=self._half is not _ATTENTION)
        number = self._seen.get(op, 0)
        self._seen[op] = number + 1
        names = self._half.get(op, ())
        if op == "mhc_head":
            self._half, self._seen = _HEAD, {}
        return names[number] if number < len(names) else None

    def _enter(self, *, from_ffn: bool) -> str:
        self._seen = {}
        self._half = _ATTENTION if from_ffn else _FFN
        self._layer += from_ffn
        return "mix_attention" if from_ffn else "mix_ffn"
