"""Every planted fault is named, and nothing else is."""

import pytest
from planted import FAULTS

from kleash.auditing import FINDINGS, audit

AUDITS = {}


@pytest.fixture(scope="module", params=FAULTS)
def planted(request):
    case = FAULTS[request.param]
    return case, audit(case.function, case.convention, name=request.param, arguments=case.arguments)


def test_the_fault_is_named_and_no_other(planted):
    case, found = planted
    assert {finding.kind for finding in found.faults} == case.faults, found.verdict
    assert case.notes <= {finding.kind for finding in found.findings if finding.severity == "note"}
