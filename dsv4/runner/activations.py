"""How many bits activations have where they meet weights or keys: decided per module group, with
reasons.

The projections of attention, the shared expert and the routed experts may take `a8` or `a4`.
Compressor, indexer, router, head and embedding never do: what they choose cannot be half right.
Attention's scores, the products of queries and cached keys, may take `a8`; no key has four bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.checkpoint.linears import StoredFormat
from dsv4.checkpoint.sources import Source
from dsv4.formats.spec import WIDTHS, Activations

SCORES = "attention scores"
GROUPS = ("attention", "shared expert", "routed experts", SCORES)
NATIVE_MAJOR = 10  # sm_100 and its kin multiply block-scaled operands
OLDEST_TRITON = (3, 6)
OLDEST_DRIVER = (12, 8)  # the CUDA version that knows sm_100

# `auto` where products of few bits are native: the accuracy table in docs/numerics.md decides.
NATIVE_AUTO: dict[str, Activations] = {
    "attention": "a16",
    "shared expert": "a8",
    "routed experts": "a16",
    SCORES: "a16",
}

# What the matrices of a stored format can be multiplied with; MXFP4 is cast to NVFP4 at load.
SERVED: dict[StoredFormat, tuple[Activations, ...]] = {
    "nvfp4": WIDTHS,
    "mxfp4": WIDTHS,
    "fp8": ("a16", "a8"),
    "plain": ("a16",),
}


@dataclass(frozen=True)
class Gpu:
    """What decides about native products."""

    capability: tuple[int, int]
    triton: tuple[int, int]
    driver: tuple[int, int]

    @property
    def missing(self) -> str | None:
        """Why this GPU has no native products of few bits."""
        major, minor = self.capability
        if major != NATIVE_MAJOR:
            return f"sm_{major}{minor} has no tensor cores for block-scaled operands, sm_100 has"
        for name, found, oldest in (
            ("Triton", self.triton, OLDEST_TRITON),
            ("driver for CUDA", self.driver, OLDEST_DRIVER),
        ):
            if found < oldest:
                return f"the {name} is {_version(found)}, expected {_version(oldest)} or newer"
        return None


@dataclass(frozen=True)
class Choice:
    widths: dict[str, Activations]  # of each group
    why: str
    refused: str | None = None  # what was asked for and cannot be had


def choose(asked: str, gpu: Gpu | None) -> Choice:
    """`asked`: EngineConfig.activations; `gpu` None: a CPU, whose references round exactly."""
    missing = gpu.missing if gpu else None
    if asked == "auto":
        if gpu is None:
            return Choice(dict.fromkeys(GROUPS, "a16"), "a CPU multiplies activations as they are")
        if missing is None:
            return Choice(NATIVE_AUTO, "the accuracy table in docs/numerics.md")
        return Choice(dict.fromkeys(GROUPS, "a16"), missing)
    if missing is None or asked == "a16":
        how = "chosen" if gpu or asked == "a16" else "chosen; references round, nothing is faster"
        return Choice(dict.fromkeys(GROUPS, _width(asked)), how)
    refused = f"activations={asked} cannot be had, a16 is used: {missing}"
    return Choice(dict.fromkeys(GROUPS, "a16"), missing, refused)


def width_of(source: Source, widths: dict[str, Activations]) -> Activations:
    """How the input of this parameter is rounded: as chosen, or finer where its format needs it."""
    if source.parameter.kind != "linear":
        return "a16"
    wanted = widths.get(source.parameter.group, "a16")
    finest_first = WIDTHS[: WIDTHS.index(wanted) + 1]
    return next(width for width in reversed(finest_first) if width in SERVED[source.format])


def query_width(
    widths: dict[str, Activations], kv_format: str, dtype: str, *, on_gpu: bool
) -> Activations:
    """What queries are rounded to before they meet cached keys. A GPU multiplies FP8 keys and
    bfloat16 queries so; the references take any."""
    if widths[SCORES] == "a16" or (on_gpu and (kv_format, dtype) != ("fp8", "bfloat16")):
        return "a16"
    return "a8"


def fallbacks(sources: Iterable[Source], widths: dict[str, Activations]) -> list[str]:
    """One line for each format that is served at another width than chosen."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for source in sources:
        group, given = source.parameter.group, width_of(source, widths)
        wanted = widths.get(group, "a16")
        if source.parameter.kind == "linear" and given != wanted:
            groups = found.setdefault((source.stored.label, wanted, given), [])
            if group not in groups:
                groups.append(group)
    return [
        f"{label} weights ({', '.join(groups)}) cannot be multiplied with {wanted} activations, "
        f"{given} is used"
        for (label, wanted, given), groups in found.items()
    ]


def describe(sources: Iterable[Source], choice: Choice) -> list[str]:
    """One line for each group: formats, widths and why."""
    groups: dict[str, dict[str, str]] = {}
    for source in sources:
        if source.parameter.kind in ("linear", "plain"):
            width = width_of(source, choice.widths)
            groups.setdefault(source.parameter.group, {})[source.stored.label] = width
    lines = []
    for group, formats in groups.items():
        served = ", ".join(f"{label} weights x {width}" for label, width in formats.items())
        lines.append(f"{group}: {served} ({choice.why if group in GROUPS else 'always'})")
    return lines


def _width(text: str) -> Activations:
    return next(width for width in WIDTHS if width == text)


def _version(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
