"""Verifies a checkpoint: headers against config, and optionally every value. Never a silent pass.

Each check ends as pass, fail or not decided; each finding names the tensor, the file, what was
found, what was expected and the likely cause.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsv4.checkpoint import LAYOUTS, names
from dsv4.checkpoint.findings import Finding
from dsv4.checkpoint.manifest import Manifest, build_manifest
from dsv4.config import ModelConfig
from dsv4.util.progress import Progress

Status = Literal["pass", "fail", "not decided"]

HEADER_CHECKS = {
    "files": "every file is there and lies in the folder",
    "header": "headers are sound and files are complete",
    "index": "the index and the files agree",
    "duplicate": "no tensor twice",
    "names": "one family of names",
    "layout": "a layout that can be read",
    "missing": "no parameter is missing",
    "unexpected": "no tensor is left over",
    "dtype": "dtypes",
    "shape": "shapes",
    "pairing": "every weight has its scales",
    "format": "one number format per group of experts",
    "config": "config.json agrees with the tensors",
    "draft": "draft blocks are complete or absent",
}
VALUE_CHECKS = {
    "nan": "no NaN or Inf in unquantised and FP8 tensors",
    "scale": "no negative or NaN scale",
    "global": "global scales are positive and on the right side of 1",
    "input": "activation scales are positive",
    "zero": "no stretch of zero blocks",
    "magnitude": "weights are of plausible size",
    "table": "expert ids are in range and differ",
}


@dataclass
class Check:
    name: str
    title: str
    status: Status
    detail: str = ""


@dataclass
class CheckReport:
    folder: str
    layout: str
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """A check with warnings does not pass."""
        return not any(item.level != "note" for item in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def check_checkpoint(
    folder: Path, *, values: bool = False, progress: Progress | None = None
) -> CheckReport:
    manifest = build_manifest(folder, ModelConfig.from_folder(folder), LAYOUTS.values())
    findings = [*manifest.findings, *_check_draft(manifest)]
    report = CheckReport(str(folder), manifest.layout.name if manifest.layout else "unknown")
    stopped = bool({"names", "layout"} & {item.check for item in findings})
    late = ("missing", "unexpected", "dtype", "shape", "pairing", "format", "config", "draft")
    unread = [*manifest.scan.unread, *(f.file for f in manifest.scan.draft_findings)]
    partly = f"{len(unread)} of the files could not be read" if unread else ""
    for name, title in HEADER_CHECKS.items():
        undecided = partly if name not in ("files", "header") else ""
        if stopped and name in late:
            undecided = undecided or "the names could not be read"
        report.checks.append(_check(name, title, findings, undecided))
    if manifest.layout is None and not stopped and manifest.sources:
        report.checks.append(
            Check("mixture", "one layout", "not decided", "a mixture that no layout describes")
        )
    if values and manifest.sources:
        from dsv4.tools.check_values import check_values

        found = check_values(manifest, progress)
        findings += found
        report.checks += [
            _check(name, title, found, partly) for name, title in VALUE_CHECKS.items()
        ]
    else:
        why = "run with --values" if not values else "nothing could be read"
        for name, title in VALUE_CHECKS.items():
            report.checks.append(Check(name, title, "not decided", why))
    report.findings = findings
    return report


def _check(name: str, title: str, findings: list[Finding], undecided: str = "") -> Check:
    mine = [item for item in findings if item.check == name and item.level != "note"]
    if mine:
        return Check(name, title, "fail", f"{len(mine)} found")
    return Check(name, title, "not decided" if undecided else "pass", undecided)


def _check_draft(manifest: Manifest) -> list[Finding]:
    """Answers need no draft blocks, but a partial one means a damaged download."""
    damage, problem = manifest.scan.draft_findings, manifest.config.dspark.problem
    if problem:
        damage = [*damage, Finding("error", "draft", problem, file="config.json")]
    if damage:
        return damage
    found = {n.removeprefix("model.") for n in manifest.scan.tensors if "mtp." in n[:10]}
    found = {name for name in found if name.startswith("mtp.")}
    if not found or manifest.scan.unread:  # the rest may be in an unreadable file
        return []
    config = manifest.config
    blocks = len({name.split(".")[1] for name in found})
    if blocks != config.num_draft_layers:
        message = f"{blocks} draft blocks, config.json says {config.num_draft_layers}"
        return [Finding("error", "draft", message, cause="a shard of the draft is missing")]
    missing = []
    for name, parameter in names.draft_parameters(config).items():
        wanted = [] if parameter.is_optional else _draft_names(name, config.num_experts)
        missing += [item for item in wanted if item not in found and not _packed(item, found)]
    return [
        Finding("error", "draft", f"is missing ({len(missing)} of the draft are)", name)
        for name in missing[:8]
    ]


def _draft_names(name: str, num_experts: int) -> list[str]:
    prefix, _, leaf = name.rpartition(".")
    parts = {"w13": ("w1", "w3"), "w2": ("w2",)}.get(leaf)
    if parts is None:
        return [name]
    if prefix.endswith(".experts"):
        return [f"{prefix}.{e}.{p}.weight" for e in range(num_experts) for p in parts]
    return [f"{prefix}.{p}.weight" for p in parts]


def _packed(name: str, found: set[str]) -> bool:
    return f"{name}_packed" in found
