"""`doctor` names the op and the layer of every planted bug, and finds nothing where none is."""

import pytest

from dsv4.tools.doctor.examine import examine_model
from tests.tools.doctor.faults import FAULTS, Fault
from tests.tools.doctor.subjects import small_subject


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_bug_is_located(fault: Fault) -> None:
    subject = small_subject(nasty=fault.nasty, changes=fault.changes, **fault.choices)
    with fault.plant(subject):
        report = examine_model(subject, only_calls=True)
    assert not report.ok
    assert report.first is not None
    cell = report.first.cell
    assert (cell.layer, cell.site) == (fault.layer, fault.site), cell.cause
    assert cell.cause is not None
    assert cell.cause.kind == fault.kind, cell.cause
    assert fault.says in cell.cause.text
