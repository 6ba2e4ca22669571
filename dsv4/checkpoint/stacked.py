"""Splits experts stored in one tensor: each matrix is a byte range of the stack.

transformers stacks a layer's experts as `gate_up_proj` [E, 2I, H] (gate rows first) and `down_proj`
[E, H, I]; its FP8 files stack the scales even where the experts are separate. No torch.
"""

from collections.abc import Iterator
from dataclasses import replace

from dsv4.checkpoint.files.header import TensorInfo
from dsv4.checkpoint.findings import Finding
from dsv4.checkpoint.names import Parameter

Modules = dict[tuple[str, int | None], dict[str, TensorInfo]]


def unstack(
    modules: Modules, parameters: dict[str, Parameter], block: int
) -> tuple[list[TensorInfo], list[Finding]]:
    """Replace stacked experts in `modules` by single ones. Also returns the activation scales, and
    what is wrong. `block`: rows of an FP8 tile."""
    activations: list[TensorInfo] = []
    findings: list[Finding] = []
    for name, parameter in parameters.items():
        for suffix, info in modules.pop((name, None), {}).items() if is_stack(name) else ():
            if suffix == "activation_scale":
                activations.append(info)
                continue
            problem = _problem(info, suffix, parameter, name, block)
            if problem:
                findings.append(Finding("error", "shape", problem, info.name, info.file.name))
                continue
            for module, expert, piece in _pieces(info, name):
                others = modules.setdefault((module, expert), {})
                if suffix in others:
                    text = f"fills the same parameter as {others[suffix].name}, expected one"
                    where = (info.name, info.file.name)
                    findings.append(Finding("error", "duplicate", text, *where))
                    break
                others[suffix] = piece
    return activations, findings


def is_stack(name: str) -> bool:
    return name.endswith((".ffn.experts.w13", ".ffn.experts.w2"))


def part_names(name: str) -> list[str]:
    """The matrices stacked in a parameter: w1 and w3, or w2."""
    prefix, _, leaf = name.rpartition(".")
    return [f"{prefix}.{part}" for part in (("w1", "w3") if leaf == "w13" else ("w2",))]


def _problem(
    info: TensorInfo, suffix: str, parameter: Parameter, name: str, block: int
) -> str | None:
    experts, rows, _ = parameter.shape
    shape = list(info.shape)
    if suffix == "weight":
        wanted = list(parameter.shape)
        return None if shape == wanted else f"shape {shape}, expected {wanted}"
    if len(shape) != 3 or shape[0] != experts:
        return f"shape {shape}, expected the scales of {experts} experts"
    part_rows = rows // len(part_names(name))
    if shape[1] in (1, rows) or (part_rows % block == 0 and shape[1] == rows // block):
        return None
    if part_rows % block:
        return (
            f"{shape[1]} rows of tiles for {rows} rows: tiles of {block} lie across the gate's and "
            f"the up projection's {part_rows} rows; expected tiles that end where the gate does"
        )
    return f"{shape[1]} rows of tiles for {rows} rows, expected {rows // block}"


def _pieces(info: TensorInfo, name: str) -> Iterator[tuple[str, int, TensorInfo]]:
    """(module, expert, byte range) of each matrix; a single row of scales covers all parts."""
    experts, rows, cols = info.shape
    parts = part_names(name)
    share = rows if rows == 1 else rows // len(parts)
    size = info.nbytes // (experts * rows)  # bytes per row
    for expert in range(experts):
        for part, module in enumerate(parts):
            first = expert * rows + (0 if rows == 1 else part * share)
            start = info.start + first * size
            piece = replace(info, shape=(share, cols), start=start, stop=start + share * size)
            yield module, expert, piece
