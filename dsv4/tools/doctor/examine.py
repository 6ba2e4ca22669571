"""The whole examination: machine, ops, model, cross-checks. READ FIRST here.

subject     what is examined: a runner with its model; weights read without the loader
trace       assigns every op call of a step its layer and station
layer       the expected result of each station (`plain` has the formulas)
check       compares call by call; `cause` explains why a call is wrong
cross       the same tokens computed in different ways
"""

from dataclasses import dataclass, field

import torch

from dsv4.runner.plan import StepPlan
from dsv4.tools.doctor.check import Checker, Evidence, GridCell, LayerMaker
from dsv4.tools.doctor.compare import Error
from dsv4.tools.doctor.cross_check import (
    Crossing,
    TapRecord,
    Watcher,
    cross_checks,
    run_alone,
    schedule,
)
from dsv4.tools.doctor.plain.layer import PlainLayer
from dsv4.tools.doctor.plain.stations import STATIONS
from dsv4.tools.doctor.subject import Subject
from dsv4.util.progress import Progress

# End to end, rounding may be amplified; exact mode has hardly any.
END_TO_END_LIMIT = 2e-2


@dataclass
class ModelReport:
    name: str
    settings: str
    layout: str
    streamed: bool
    num_tokens: int
    cells: list[GridCell]
    end_to_end: dict[int, Error]
    judged_end_to_end: bool
    unplaced: list[str]
    first: Evidence | None
    crossings: list[Crossing] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)  # what serves which ops, by step shape

    @property
    def wrong(self) -> list[GridCell]:
        """Wrong cells, in order of layer and station."""
        return [cell for cell in self.cells if cell.status != "ok"]

    @property
    def end_to_end_ok(self) -> bool:
        last = max(self.end_to_end, default=None)
        return last is None or self.end_to_end[last].mean <= END_TO_END_LIMIT

    @property
    def ok(self) -> bool:
        crossed = all(item.status != "wrong" for item in self.crossings)
        settled = self.end_to_end_ok or not self.judged_end_to_end
        return not self.wrong and not self.unplaced and crossed and settled


def examine_model(
    subject: Subject, *, only_calls: bool = False, progress: Progress | None = None
) -> ModelReport:
    """Compare call by call on the engine's inputs; then, unless `only_calls`, end to end and cross.

    `progress` receives the layer that the engine has reached.
    """
    with torch.inference_mode():
        make_layer = layers_of(subject, progress)
        config, count = subject.config, len(subject.token_ids)
        checker = Checker(config.num_layers, make_layer, end_to_end=not only_calls)
        alone = TapRecord(make_layer, config.num_layers, count // 4)
        runner = subject.runner()
        steps = schedule(count, streamed=subject.streamed)
        watchers: list[Watcher] = [checker] if subject.streamed or only_calls else [checker, alone]
        tracer = run_alone(runner, subject.token_ids, steps, watchers)
        order = list(STATIONS)
        cells = sorted(checker.cells.values(), key=lambda c: (c.layer, order.index(c.station)))
        report = ModelReport(
            subject.name,
            subject.summary,
            subject.layout,
            subject.streamed,
            count,
            cells,
            checker.end_to_end,
            subject.formats.is_exact,
            sorted(tracer.unplaced),
            checker.first,
        )
        if not only_calls:
            plan = StepPlan()
            report.crossings = list(cross_checks(subject, make_layer, alone, plan))
            report.plan = plan.summary()
    return report


def layers_of(subject: Subject, progress: Progress | None = None) -> LayerMaker:
    """Plain layers on demand; their weights are kept if all of them fit into memory."""
    kept: dict[int, PlainLayer] = {}

    def make(number: int) -> PlainLayer:
        if number not in kept:
            if subject.streamed:
                kept.clear()
            if progress is not None:
                progress(number, subject.config.num_layers)
            kept[number] = PlainLayer(
                subject.config,
                number,
                subject.weights,
                subject.formats,
                subject.settings.device,
                subject.examined,
            )
        return kept[number]

    return make
