"""Audits of known packages, and the page that lists them."""

from functools import cache

import make_audit_page as tool
import pytest
from scipy.optimize import brentq

import kleash
from kleash import Audit
from kleash.auditing import audits_of, cases_of
from kleash.auditing.targets import find_target, target_names
from kleash.errors import CannotRunError

of_peers = pytest.mark.peers("trl", "verl", "openrlhf", "liger_kernel")


@cache
def found(target: str) -> Audit:
    (audit,) = audits_of(cases_of(target))
    return audit


def kinds(target: str) -> set[str]:
    return {finding.kind for finding in found(target).findings}


def dead(target: str) -> list[tuple[float, float]]:
    return [(row.low, row.high) for row in found(target).zones if row.kind == "gradient"]


KL, REVERSE, NEAR = "KL(p ‖ q)", "KL(q ‖ p)", ", where no log ratio is large"


@of_peers
@pytest.mark.parametrize(
    ("target", "value", "gradient"),
    [
        ("verl:kl", KL, "zero"),
        ("verl:abs", "E_p |log p - log q|", "sum |p - q|"),
        ("verl:mse", "E_p (log p - log q)^2 / 2", KL),
        ("verl:low_var_kl", f"{KL}{NEAR}", f"{REVERSE}{NEAR}"),
        ("verl:low_var_kl+", f"{KL}{NEAR}", KL),
        ("verl:kl+", KL, KL),
        ("verl:reward_kl", KL, KL),
        ("verl:reward_low_var_kl", f"{KL}{NEAR}", f"{KL} - {REVERSE}{NEAR}"),
        ("trl:grpo", KL, KL),
        ("trl:grpo_plain", KL, REVERSE),
        ("trl:rloo", KL, KL),
        ("trl:chunked_forward", REVERSE, REVERSE),
        ("trl:chunked_reverse", KL, KL),
        ("trl:sdft_sampled", "none of the table", KL),
        ("liger:grpo", KL, REVERSE),
        ("liger:grpo_bias_correction", KL, KL),
        ("liger:jsd_reverse", KL, KL),
    ],
)
def test_values_and_gradients_of_known_code(target, value, gradient):
    assert (found(target).value, found(target).gradient) == (value, gradient)


@of_peers
@pytest.mark.parametrize("target", ["verl:low_var_kl", "openrlhf:k3"])
def test_a_k3_clamped_at_ten_has_a_dead_gradient_beyond(target):
    below = brentq(lambda d: 2.718281828459045**d - 1 - d - 10, 1, 5)
    above = brentq(lambda u: 2.718281828459045**-u - 1 + u - 10, 5, 20)
    (first, second) = dead(target)
    assert first == (float("-inf"), pytest.approx(-below, abs=1e-3))
    assert second == (pytest.approx(above, abs=1e-3), float("inf"))
    assert "dead_gradient" in kinds(target)


@of_peers
def test_right_gradients_are_right_off_policy_only_with_importance_weights():
    for target in ("trl:grpo", "liger:grpo_bias_correction", "openrlhf:k1_unbiased", "openrlhf:k3_unbiased"):
        assert not kinds(target) & {"wrong_gradient", "off_policy_gradient", "zero_gradient"}
    for target in ("verl:low_var_kl+", "verl:mse", "verl:kl+"):
        assert "wrong_gradient" not in kinds(target) and "off_policy_gradient" in kinds(target)
    for target in ("verl:kl", "openrlhf:k1"):
        assert "zero_gradient" in kinds(target)


@of_peers
def test_padding_counts_only_in_the_reward_of_openrlhf():
    assert "padding_counts" in kinds("openrlhf:reward_k1")
    assert not kinds("verl:reward_kl") & {"padding_counts", "padding_in_denominator"}


@of_peers
def test_verl_full_raises():
    with pytest.raises(CannotRunError, match="verl:full raised NotImplementedError"):
        found("verl:full")


@pytest.mark.parametrize("case", find_target("kleash").cases, ids=lambda case: case.name)
def test_kleash_itself_has_no_fault(case):
    audit = found(f"kleash:{case.name}")  # type: ignore[attr-defined]
    assert not audit.faults
    assert audit.versions["kleash"] == kleash.__version__


@of_peers
def test_audits_record_the_code_path_and_version():
    audit = found("openrlhf:k1")
    assert "runs `openrlhf.models.utils.compute_approx_kl`" in audit.notes
    assert any("deepspeed is not installed" in note for note in audit.notes)
    assert audit.versions["openrlhf"].split(".")[0].isdigit()


@of_peers
def test_the_page_is_up_to_date():
    assert {path.stem for path in tool.FOLDER.glob("*.md")} == {"index", *target_names()}
    for name in ("openrlhf", "kleash"):
        audits = [found(f"{name}:{case.name}") for case in find_target(name).cases]
        assert not tool.differs(name, tool.page(name, audits)), "run: python tools/make_audit_page.py"
