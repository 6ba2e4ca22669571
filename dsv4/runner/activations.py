"""Activation precision in products with weights: chosen per module group, with reasons.

Attention projections, the shared expert and the routed experts may use `a8` or `a4`. Compressor,
indexer, router, head and embedding always use `a16`: they make discrete choices that rounding would
change. Queries are not rounded for products with cached keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.checkpoint.sources import Source
from dsv4.checkpoint.stored_matrix import StoredFormat
from dsv4.formats.spec import FP8_BLOCK, WIDTHS, Activations

GROUPS = ("attention", "shared expert", "routed experts")
# sm_100, sm_120 and their families multiply block-scaled operands, sm_90 multiplies FP8 ones
HOPPER, DATA_CENTER, WORKSTATION = 9, 10, 12
OFFICIAL = {"shared expert": "fp8", "routed experts": "mxfp4"}
NOT_DEFAULT = {
    HOPPER: "on sm_90 `auto` is a8 for experts in the official formats, FP8 and MXFP4, alone",
    WORKSTATION: "a8 and a4 compile for sm_120 but nobody has run them; ask for them",
}
OLDEST_TRITON = (3, 6)
OLDEST_DRIVER = (12, 8)  # the first CUDA version with sm_100

# `auto` where low-precision products are native; chosen by the accuracy table in docs/numerics.md.
NATIVE_AUTO: dict[str, Activations] = {
    "attention": "a16",
    "shared expert": "a8",
    "routed experts": "a16",
}

# The same on sm_90, for experts in the official formats.
HOPPER_AUTO = NATIVE_AUTO | {"routed experts": "a8"}

# The official model rounds the input of every FP8 matrix to a8 but this one's.
UNROUNDED = "attn.wo_a.weight"

# Activation widths that each stored format supports; MXFP4 outside experts is cast to NVFP4.
SERVED: dict[StoredFormat, tuple[Activations, ...]] = {
    "nvfp4": WIDTHS,
    "mxfp4": WIDTHS,
    "fp8": ("a16", "a8"),
    "plain": ("a16",),
}


@dataclass(frozen=True)
class GpuFacts:
    """The facts that decide whether low-precision products are native."""

    capability: tuple[int, int]
    triton: tuple[int, int]
    driver: tuple[int, int]
    official: bool = False  # the checkpoint's experts are in the official formats

    def missing(self, width: str) -> str | None:
        """Why this GPU has no native products at this width; `auto`: at any."""
        major, minor = self.capability
        if major not in (DATA_CENTER, WORKSTATION) and (major != HOPPER or width == "a4"):
            what = "a4: tensor cores" if major == HOPPER else "tensor cores"
            return (
                f"sm_{major}{minor} has no {what} for block-scaled operands, sm_100 and sm_120 have"
            )
        for name, found, oldest in (
            ("Triton", self.triton, OLDEST_TRITON),
            ("driver for CUDA", self.driver, OLDEST_DRIVER),
        ):
            if found < oldest and (major != HOPPER or name == "Triton"):
                return f"the {name} is {_version(found)}, expected {_version(oldest)} or newer"
        return None


@dataclass(frozen=True)
class ActivationChoice:
    widths: dict[str, Activations]  # by module group
    why: str
    refused: str | None = None  # what was requested but is not available


def choose_activations(asked: str, gpu: GpuFacts | None) -> ActivationChoice:
    """`asked`: EngineConfig.activations; `gpu` None: a CPU, where references round exactly."""
    missing = gpu.missing(asked) if gpu else None
    if asked == "auto":
        if gpu is None:
            return ActivationChoice(
                dict.fromkeys(GROUPS, "a16"), "a CPU multiplies activations as they are"
            )
        if missing is None and gpu.capability[0] == DATA_CENTER:
            return ActivationChoice(NATIVE_AUTO, "the accuracy table in docs/numerics.md")
        if missing is None and gpu.capability[0] == HOPPER and gpu.official:
            return ActivationChoice(HOPPER_AUTO, "the rule for sm_90 in docs/numerics.md")
        why = missing or NOT_DEFAULT[gpu.capability[0]]
        return ActivationChoice(dict.fromkeys(GROUPS, "a16"), why)
    if missing is None or asked == "a16":
        how = "chosen" if gpu or asked == "a16" else "chosen; references round, nothing is faster"
        return ActivationChoice(dict.fromkeys(GROUPS, _width(asked)), how)
    refused = f"activations={asked} cannot be had, a16 is used: {missing}"
    return ActivationChoice(dict.fromkeys(GROUPS, "a16"), missing, refused)


def are_official(sources: Iterable[Source]) -> bool:
    """Whether all experts are in the official formats."""
    experts = [s for s in sources if s.parameter.kind == "linear" and s.parameter.group in OFFICIAL]
    tiles = ((0, 0), (FP8_BLOCK, FP8_BLOCK))  # MXFP4 has none
    return bool(experts) and all(
        s.format == OFFICIAL[s.parameter.group] and s.stored.tile in tiles for s in experts
    )


def width_of(source: Source, widths: dict[str, Activations]) -> Activations:
    """Activation width for this parameter: as chosen, or finer where its format requires it."""
    if source.parameter.kind != "linear":
        return "a16"
    wanted = widths.get(source.parameter.group, "a16")
    finest_first = WIDTHS[: WIDTHS.index(wanted) + 1]
    served = SERVED[source.format]
    if _by_design(source):
        served = tuple(width for width in served if width != "a8")
    return next(width for width in reversed(finest_first) if width in served)


def _by_design(source: Source) -> bool:
    """Whether the input stays unrounded where others are rounded to a8."""
    return source.name.endswith(UNROUNDED) and "a8" in SERVED[source.format]


def fallbacks(sources: Iterable[Source], widths: dict[str, Activations]) -> list[str]:
    """One line per format that runs at a width other than the chosen one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for source in sources:
        group, given = source.parameter.group, width_of(source, widths)
        wanted = widths.get(group, "a16")
        if source.parameter.kind == "linear" and given != wanted and not _by_design(source):
            groups = found.setdefault((source.stored.label, wanted, given), [])
            if group not in groups:
                groups.append(group)
    return [
        f"{label} weights ({', '.join(groups)}) cannot be multiplied with {wanted} activations, "
        f"{given} is used"
        for (label, wanted, given), groups in found.items()
    ]


def describe(sources: Iterable[Source], choice: ActivationChoice) -> list[str]:
    """One line per group: formats, widths and the reason."""
    groups: dict[str, dict[str, str]] = {}
    for source in sources:
        if source.parameter.kind in ("linear", "plain"):
            width = width_of(source, choice.widths)
            label = f"{source.stored.label}{' wo_a' if _by_design(source) else ''}"
            groups.setdefault(source.parameter.group, {})[label] = width
    lines = []
    for group, formats in groups.items():
        served = ", ".join(f"{label} weights x {width}" for label, width in formats.items())
        lines.append(f"{group}: {served} ({choice.why if group in GROUPS else 'always'})")
    return lines


def _width(text: str) -> Activations:
    return next(width for width in WIDTHS if width == text)


def _version(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
