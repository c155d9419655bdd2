"""The pytest fixture ``kleash_audit``: the audit of a KL function as a test of the project that it belongs to.

pytest loads this module in every project that kleash is installed beside, so it imports nothing.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kleash.auditing import Convention
    from kleash.records import Audit


@pytest.fixture(scope="session")
def kleash_audit() -> "Callable[..., Audit]":
    """A function that audits a KL function and fails the test with what it finds.

        def test_our_kl_penalty(kleash_audit):
            kleash_audit(kl_penalty, "loss", arguments={"kind": "k3"}, fail_on={"zero_gradient", "dead_gradient"})

    It takes the function, the convention by which it is called (a name of ``kleash.auditing.CONVENTIONS`` or a
    record of one's own), keyword ``arguments`` to bind, and ``fail_on``, the kinds of findings that fail
    the test: keys of ``kleash.auditing.FINDINGS``, or "wrong", "fragile", "note" for all of that severity and
    "fault" (the default) for wrong and fragile; several may stand in one text, with commas between. It
    returns the ``Audit``.
    """

    def check(
        function: Callable[..., Any],
        convention: "str | Convention",
        *,
        arguments: Mapping[str, Any] | None = None,
        fail_on: str | Collection[str] = ("fault",),
    ) -> "Audit":
        from kleash.auditing import audit, require_kinds
        from kleash.errors import KleashError

        named = (fail_on,) if isinstance(fail_on, str) else fail_on
        kinds = tuple(kind.strip() for words in named for kind in words.split(",") if kind.strip())
        try:
            require_kinds(kinds)
            found = audit(function, convention, arguments=arguments)
        except KleashError as error:
            pytest.fail(f"kleash: {error}", pytrace=False)
        failing = found.failing(kinds)
        if failing:
            pytest.fail(_explained(found, failing), pytrace=False)
        return found

    return check


def _explained(found: "Audit", failing: Collection[Any]) -> str:
    """What the test's reader sees: each finding with its kind, then the verdict."""
    lines = [f"{found.target}, called as {found.summary}, fails its audit:"]
    for finding in failing:
        where = f" ({finding.where})" if finding.where else ""
        lines.append(f"  {finding.kind}: {finding.sentence}{where}")
        lines.append(f"    change: {finding.remedy}")
    said = {finding.sentence for finding in failing}
    return "\n".join([*lines, "", *(line for line in found.verdict if line not in said)])
