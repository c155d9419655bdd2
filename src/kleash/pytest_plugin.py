"""The pytest fixture ``kleash_audit``: the audit of a KL function in a project's own tests.

pytest loads this module wherever kleash is installed, so it imports torch and the audit only when it is used. Nothing
else imports it, so that no extra of kleash installs pytest.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kleash.auditing import Convention
    from kleash.store import Audit, Finding


@pytest.fixture(scope="session")
def kleash_audit() -> "Callable[..., Audit]":
    """A function that audits a KL function and fails the test if there are findings.

        def test_our_kl_penalty(kleash_audit):
            kleash_audit(kl_penalty, "loss", arguments={"kind": "k3"}, fail_on={"zero_gradient", "dead_gradient"})

    Its arguments are the function, the convention by which it is called (a name of ``kleash.auditing.CONVENTIONS``, a
    call or a record), keyword ``arguments`` to bind, and ``fail_on``: the kinds of findings that fail the test (those
    of docs/reference/auditing.md), "wrong", "fragile" or "note" for all of that severity, or "fault" (the default) for
    wrong and fragile. A string may hold several, separated by commas. It returns the ``Audit``.
    """

    def check(
        function: Callable[..., Any],
        convention: "str | Convention",
        *,
        arguments: Mapping[str, Any] | None = None,
        fail_on: str | Collection[str] = ("fault",),
    ) -> "Audit":
        from kleash.auditing import audit
        from kleash.auditing.finding_kinds import kinds_of
        from kleash.errors import KleashError

        try:
            kinds = kinds_of((fail_on,) if isinstance(fail_on, str) else fail_on)
            result = audit(function, convention, arguments=arguments)
        except KleashError as error:
            pytest.fail(f"kleash: {error}", pytrace=False)
        failing = result.failing(kinds)
        if failing:
            pytest.fail(_failure_message(result, failing), pytrace=False)
        return result

    return check


def _failure_message(result: "Audit", failing: "Collection[Finding]") -> str:
    """Each failing finding with its remedy, then the rest of the verdict."""
    sentences = {finding.sentence for finding in failing}
    lines = [
        f"{result.target}, called as {result.summary}, fails its audit:",
        *(f"  {finding}\n    change: {finding.remedy}" for finding in failing),
        "",
        *(line for line in result.verdict if line not in sentences),
    ]
    return "\n".join(lines)
