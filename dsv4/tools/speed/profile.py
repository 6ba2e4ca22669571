"""The kernels of one step, by family, timed on the GPU; and a picture of single layers: their
kernels over time, and how fast they read weights.

Kernels may overlap: one that starts early is drawn from its start, though it may wait for the one
before it. Its weights count as read evenly over that time, so a rate is an average.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import torch

from dsv4.config import LayerKind
from dsv4.util.sizes import size_text

# kernels grouped into families for the table of shares; see also `families_of`
FAMILIES = {
    "experts": (
        "_up_kernel", "_down_kernel", "_combine_kernel", "_group_kernel", "_count_kernel",
        "_place_kernel", "_activate_kernel", "_own_kernel", "up_stream", "down_stream",
        "a8_up_stream", "a8_down_stream",
    ),
    "router": ("_gate_kernel", "_top_k_kernel"),
    "linear": (
        "_linear_kernel", "_expand_kernel", "_expand_fp8_kernel", "_few_rows_kernel",
        "_many_rows_kernel", "_quantize_kernel", "linear_stream", "stored_stream", "_a8_kernel",
        "_a8_prompt_kernel", "_a8_prompt_experts_kernel", "_a8_rows_kernel", "_prompt_kernel",
        "a8_stream",
    ),
    "mhc": (
        "update_kernel", "few_update_kernel", "_mix_kernel", "comb_kernel", "_stage_end_kernel",
        "_update_prompt_kernel", "_matrix_parts_kernel",
    ),
    "attention": (
        "_loop_kernel", "_merge_kernel", "_split_kernel", "_weights_kernel", "_values_kernel",
        "_unpack_kernel", "_prefill_kernel",
    ),
    "index": (
        "_scores_kernel", "_prompt_scores_kernel", "_select_kernel", "_peaks_kernel",
        "_select_chunk_kernel", "_select_row_kernel", "_select_short_kernel", "_index_kernel",
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

LEFT, WIDTH, RIGHT = 70, 1000, 90
HEAD, BAR, RATE, FOOT = 44, 20, 90, 40
UP = ("up_stream", "_up_kernel", "a8_up_stream")
DOWN = ("_down_kernel", "down_stream", "a8_down_stream")
IDLE = 0.25  # share of the read bandwidth below which memory idles
COLORS = {
    "experts": "#d9893b", "linear": "#7aa6c2", "mhc": "#8bb174", "attention": "#b07aa1",
    "state": "#c9b458", "index": "#6f8fa8", "router": "#cf6f6f",
}  # fmt: skip


@dataclass(frozen=True)
class KernelSpan:
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Profile:
    """Kernels of one step, timed on the GPU."""

    num_kernels: int
    share_us: dict[str, float]  # by family; kernels overlap, so the sum may exceed the step
    spans: Sequence[KernelSpan] = ()


def profile_step(step: Callable[[], object], device: torch.device) -> Profile:
    if device.type == "cpu":
        step()
        return Profile(0, {})
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spans = [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type.name == "CUDA" and not event.name.startswith("Mem")
    ]
    spans.sort(key=lambda span: span.begin_us)
    shares: dict[str, float] = {}
    for span, family in zip(spans, families_of([span.name for span in spans]), strict=True):
        shares[family] = shares.get(family, 0.0) + span.end_us - span.begin_us
    return Profile(len(spans), dict(sorted(shares.items(), key=lambda item: -item[1])), spans)


def family_of(kernel: str) -> str:
    for family, names in FAMILIES.items():
        if kernel in names:
            return family
    return "other"


def families_of(names: Sequence[str]) -> list[str]:
    """The family of each kernel of a step, in the order of launches. Some kernels multiply for
    attention and for experts: products after a router belong to its experts, and a product just
    before the choice of experts is the router's."""
    found, routed = [], False
    for name, after in zip(names, [*names[1:], ""], strict=True):
        family = family_of(name)
        if family == "linear" and (routed or after == "_top_k_kernel"):
            family = "experts" if routed else "router"
        routed = family == "router" or (routed and family in ("experts", "other"))
        found.append(family)
    return found


@dataclass(frozen=True)
class LayerTrace:
    title: str
    spans: Sequence[KernelSpan]
    weights: Sequence[float]  # bytes that each span reads
    read_gbs: float  # memory bandwidth

    @property
    def seconds(self) -> float:
        return (max(s.end_us for s in self.spans) - self.spans[0].begin_us) / 1e6

    def rates(self, columns: int) -> list[float]:
        """GB/s in equal pieces of the layer's time."""
        begin, width = self.spans[0].begin_us, self.seconds * 1e6 / columns
        found = [0.0] * columns
        for span, size in zip(self.spans, self.weights, strict=True):
            rate = size / max(span.end_us - span.begin_us, 1e-3) / 1e3
            for column in range(columns):
                low, high = begin + column * width, begin + (column + 1) * width
                covered = min(high, span.end_us) - max(low, span.begin_us)
                found[column] += rate * max(covered, 0.0) / width
        return found

    def summary(self) -> str:
        rates = self.rates(WIDTH)
        idle = sum(rate < IDLE * self.read_gbs for rate in rates) / len(rates)
        us, size = self.seconds * 1e6, sum(self.weights)
        floor = size / self.read_gbs / 1e3
        return (
            f"{us:.1f} us, {len(self.spans)} kernels, {size_text(size)} of weights: floor "
            f"{floor:.1f} us, x{us / max(floor, 1e-9):.2f}; memory idle for {idle * us:.1f} us"
        )


def split_layers(spans: Sequence[KernelSpan]) -> list[list[KernelSpan]]:
    """The kernels of each layer, up to its experts; those before the first layer belong to it."""
    spans = sorted(spans, key=lambda span: span.begin_us)
    layers: list[list[KernelSpan]] = [[]]
    before = ""
    for span, family in zip(spans, families_of([span.name for span in spans]), strict=True):
        if before == "experts" and family not in ("experts", "other"):
            layers.append([])
        layers[-1].append(span)
        before = before if family == "other" else family
    return layers if before == "experts" else layers[:-1]


def weight_bytes(
    spans: Sequence[KernelSpan], sizes: dict[str, int], layer: int, visited: float
) -> list[float]:
    """Bytes of weights that each kernel of a layer reads. `sizes`: of all parameters; `visited`:
    the share of experts. Products are told apart by their order; unless there are exactly four,
    their bytes are spread over their time, and so are those of experts without up and down."""
    prefix = f"layers.{layer}."
    own = {name.removeprefix(prefix): s for name, s in sizes.items() if name.startswith(prefix)}

    def total(*parts: str) -> float:
        return sum(float(size) for name, size in own.items() if any(p in name for p in parts))

    order = [0.0, total("wq_b."), total("wo_a."), total("wo_b.")]
    order[0] = total("attn.") - sum(order) - total("sink", "norm")
    gate, shared = total("gate.weight"), total("shared_experts.w13")
    up, down = total(".experts.w13") * visited, total(".experts.w2") * visited
    families = families_of([span.name for span in spans])
    linear = [s for s, family in zip(spans, families, strict=True) if family == "linear"]
    whole, products = _microseconds(linear), list[KernelSpan]()
    if not any(span.name in DOWN for span in spans):
        pairs = zip(spans, families, strict=True)
        products = [s for s, family in pairs if family == "experts" != family_of(s.name)]
    streams = any(span.name == "up_stream" for span in spans)  # the gate reads the shared one's
    found = []
    for span, family in zip(spans, families, strict=True):
        size, us = 0.0, _microseconds([span])
        if family == "linear" and len(linear) == len(order):
            size = order[linear.index(span)]
        elif family == "linear":
            size = sum(order) * us / max(whole, 1e-9)
        elif span in products:
            size = (up + down + total("shared_experts.")) * us / max(_microseconds(products), 1e-9)
        elif family == "router" and span.name != "_top_k_kernel":
            size = gate + (shared if streams else 0.0)
        elif span.name in UP:
            size = up + (0.0 if streams else shared)
        elif span.name in DOWN:
            size = down + total("shared_experts.w2")
        elif family == "mhc" and "update" in span.name:
            size = total("hc_") / 2
        found.append(size)
    return found


def _microseconds(spans: Sequence[KernelSpan]) -> float:
    return sum(span.end_us - span.begin_us for span in spans)


def middle_layers(
    case: str, spans: Sequence[KernelSpan], kinds: Sequence[LayerKind], sizes: dict[str, int],
    visited: float, read_gbs: float,
) -> Iterator[LayerTrace]:  # fmt: skip
    """The middle layer of each kind in a step."""
    layers = split_layers(spans)
    for kind in dict.fromkeys(kinds):
        places = [place for place, found in enumerate(kinds) if found == kind]
        layer = places[len(places) // 2]
        own = layers[layer]
        weights = weight_bytes(own, sizes, layer, visited)
        yield LayerTrace(f"{case}: layer {layer}, {kind}", own, weights, read_gbs)


def picture(traces: Sequence[LayerTrace]) -> str:
    """An SVG; all layers share one scale."""
    scale = WIDTH / max(trace.seconds * 1e6 for trace in traces)
    parts, top = [], 0.0
    for trace in traces:
        block, height = _block(trace, top, scale)
        parts += block
        top += height
    width = LEFT + WIDTH + RIGHT
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:.0f}" '
        f'viewBox="0 0 {width} {top:.0f}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{top:.0f}" fill="white"/>', *parts, "</svg>\n",
    ])  # fmt: skip


def _block(trace: LayerTrace, top: float, scale: float) -> tuple[list[str], float]:
    begin = trace.spans[0].begin_us
    parts = [
        _text(LEFT, top + 16, trace.title, 'font-weight="bold"'),
        _text(LEFT, top + 32, trace.summary()),
    ]
    ends: list[float] = []  # of the last bar in each row
    families = families_of([span.name for span in trace.spans])
    for span, family in zip(trace.spans, families, strict=True):
        row = next((i for i, end in enumerate(ends) if end <= span.begin_us), len(ends))
        ends[row : row + 1] = [span.end_us]
        x, y = LEFT + (span.begin_us - begin) * scale, top + HEAD + row * BAR
        wide = max((span.end_us - span.begin_us) * scale, 0.5)
        color = COLORS.get(family, "#999")
        parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{BAR - 3}" fill="{color}">'
            f"<title>{escape(span.name)} {span.end_us - span.begin_us:.1f} us</title></rect>"
        )
        name = span.name.strip("_").removesuffix("_kernel")
        if wide > 6 * len(name):
            parts.append(_text(x + 3, y + 12, name, 'fill="white"'))
    floor = top + HEAD + len(ends) * BAR + RATE
    pixels = max(1, round(trace.seconds * 1e6 * scale))
    high = RATE * 0.9 / trace.read_gbs
    path = [f"M{LEFT} {floor:g}"]
    for column, rate in enumerate(trace.rates(pixels)):
        path.append(f"H{LEFT + column}V{floor - min(rate * high, RATE):.1f}")
    path.append(f"H{LEFT + pixels}V{floor:g}z")
    limit = floor - 0.9 * RATE
    parts += [
        f'<path d="{"".join(path)}" fill="#5d6b75"/>',
        f'<path d="M{LEFT} {limit:g}h{WIDTH}" stroke="#b03030" stroke-dasharray="4 3"/>',
        _text(LEFT + WIDTH + 6, limit + 4, f"{trace.read_gbs:.0f} GB/s", 'fill="#b03030"'),
    ]
    for us in range(0, int(WIDTH / scale) + 1, 10):
        x = LEFT + us * scale
        parts.append(f'<path d="M{x:.1f} {floor:g}v4" stroke="#777"/>')
        parts.append(_text(x - 6, floor + 16, f"{us}"))
    parts.append(_text(LEFT + WIDTH + 6, floor + 16, "us"))
    return parts, floor + FOOT - top


def _text(x: float, y: float, text: str, more: str = "") -> str:
    more = f" {more}" if more else ""
    return f'<text x="{x:.1f}" y="{y:g}"{more}>{escape(text)}</text>'
