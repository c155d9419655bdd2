"""Errors of functions that cannot be audited, and the records of audits."""

import json
import sys
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan

import pytest
import torch
import torch.nn.functional as nnf
from single_faults import clamped_after, right, textbook

import kleash
from kleash.auditing import CONVENTIONS, audit, from_fields
from kleash.auditing.quantities import MODERATE_PAIRS, match_quantity
from kleash.errors import CannotRunError, OptionError, ShapeError, UnknownNameError
from kleash.registry import look_up


def raises(p, q):
    raise RuntimeError("nothing\nto see")


def goes_backward(p, q):
    (p - q).square().sum().backward()
    return (p - q).square()


@pytest.mark.parametrize(
    ("function", "convention", "error", "words"),
    [
        (3, "loss", CannotRunError, ["3 cannot be called; give the function"]),
        (lambda p: p, "loss", CannotRunError, ["TypeError", "takes 1 positional argument", "'loss'"]),
        (raises, "loss", CannotRunError, ["raises raised RuntimeError: nothing when called"]),
        (lambda p, q: p.topk(3)[0].sum(-1), "log_probabilities", CannotRunError, ["of 2 tokens; let it"]),
        (lambda p, q: sys.exit(3), "loss", CannotRunError, ["SystemExit: 3"]),
        (lambda p, q: (p - q).expand(8, 1) + 0, "loss", CannotRunError, ["expanded size", "fits it"]),
        (torch.nn.KLDivLoss, "logits", CannotRunError, ["such as 'f()(logits_p, logits_q) -> token kl l"]),
        (goes_backward, "loss", CannotRunError, ["cannot be differentiated", "a second time"]),
        (lambda p, q: (p - q).to("meta"), "loss", CannotRunError, ["torch.float64 on meta"]),
        (lambda p, q: 3.0, "loss", CannotRunError, ["returned float", "tensor of floating-point"]),
        (lambda p, q: (p - q).long(), "loss", CannotRunError, ["torch.int64"]),
        (partial(nnf.kl_div, reduction="sum"), "kl_div", ShapeError, ["that fits it, bind its reduction"]),
        (lambda p, q: (p - q).mean(), "loss", ShapeError, ["returned ()", "(8, 1)", "reduction"]),
        (lambda p, q: p - q, "mean_loss", ShapeError, ["returned (1, 1)", "()"]),
        (lambda p, q, m: p * (1 - m), "loss_with_mask", CannotRunError, ["bool tensor", "that fits it"]),
        (kleash.kl, "loss_with_mask", CannotRunError, ["kleash.divergences", "kl"]),
        (right, "los", UnknownNameError, ["'los'", "did you mean 'loss'"]),
        (lambda p, q: {"kl": p}, "loss", CannotRunError, ["such as 'f(token_logp, token_logq)[0] -> t"]),
        (lambda p, q, target: p, "packed_loss_with_mask", OptionError, ["token_logq, labels) -> token kl l"]),
        (lambda p, q, mask: p, "mean_distillation_with_labels", OptionError, ["the labels as its 'mask'"]),
        (right, "f(token_logp, -> mean", OptionError, ["no Python expression: '(' was never closed"]),
        (right, "f(token_logp, token_logq) -> tokn", UnknownNameError, ["did you mean 'token'"]),
    ],
)
def test_a_function_that_does_not_fit_its_convention_raises(function, convention, error, words, unhooked):
    with pytest.raises(error) as caught:
        audit(function, convention)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert ("; let it take" in text) is ("of 2 tokens" in text), text
    assert "\n" not in text and not text.endswith(".")


def test_a_function_that_overwrites_its_arguments_is_audited_by_its_results():
    def tidy(p, q):
        return p - q

    def in_its_place(p, q):
        return q.sub_(p.detach()).neg_()

    for place in ("reward", "metric"):
        ours, theirs = (audit(function, place, name="same") for function in (tidy, in_its_place))
        assert (ours.value, ours.gradient) == (theirs.value, theirs.gradient)
        kinds = {finding.kind for finding in theirs.findings} - {finding.kind for finding in ours.findings}
        assert "changes_inputs" in kinds, place
        rows, their_rows = ((each.values, each.accuracy, each.edges) for each in (ours, theirs))
        assert repr(rows) == repr(their_rows)  # in which NaN is equal to itself


def test_a_function_with_gradients_only_in_its_parameters_is_detached():
    scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    found = audit(lambda p, q: scale * (p - q).detach(), "loss")
    assert "detached" in {finding.kind for finding in found.faults}
    assert found.gradient == "none"


def test_a_nan_gradient_everywhere_is_reported():
    found = audit(lambda p, q: (p - q) * nan, "loss")
    (sentence,) = [finding.sentence for finding in found.faults if finding.kind == "nan_gradient"]
    assert sentence == "Its gradient is NaN where log p - log q is any number."
    assert found.verdict[1].endswith("pair it is NaN or infinite.")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"place": "lost"}, "loss, reward, metric"),
        ({"gives": "all"}, "vocabulary, token, sequence, mean"),
        ({"sees": "nothing"}, "tokens, distributions, hidden"),
        ({"sign": 0}, "1, -1"),
        ({"claims": "kll"}, "did you mean 'kl'"),
        ({"claims": "skew:0.1"}, "family of divergences is called 'skew'; there are jensen_shannon, skew_kl"),
        ({"claims": "skew_kl:half"}, "the parameter of 'skew_kl:half' is no number"),
    ],
)
def test_conventions_with_unknown_values_raise(wrong, words, unhooked):
    with pytest.raises((OptionError, UnknownNameError), match=words):
        replace(CONVENTIONS["loss"], **wrong)


def test_conventions_resolve_by_name():
    assert all(
        look_up(CONVENTIONS, record, "convention") is record and record.name == name
        for name, record in CONVENTIONS.items()
    )
    assert all(record.summary.startswith("f(") for record in CONVENTIONS.values())
    assert all(r.takes_mask is ("mask" in name or "labels" in name) for name, r in CONVENTIONS.items())
    assert all(record.takes_behaviour is ("behaviour" in name) for name, record in CONVENTIONS.items())


def test_an_audit_has_its_name_the_versions_and_the_ends_of_its_zones():
    assert audit(textbook, "log_probabilities").target == "single_faults.textbook"
    assert audit(partial(textbook), "log_probabilities").target == "single_faults.textbook"
    versions = audit(kleash.kl, "log_probabilities").versions
    assert versions["torch"] == torch.__version__ and versions["kleash"] == kleash.__version__
    found = json.loads(audit(clamped_after, "loss").to_json())
    assert found["zones"][0]["high"] == pytest.approx(-2.61, abs=0.01)
    assert found["schema"] == 4 and found["zones"][-1]["low"] == "-Infinity"


def test_failing_by_kind_or_severity():
    found = audit(textbook, "log_probabilities")
    assert {f.kind for f in found.failing({"nan_value"})} == {"nan_value"}
    assert found.failing({"fault"}) == found.faults
    assert {f.kind for f in found.failing({"note"})} == {"token_gradient", "cancellation"}
    assert found.failing(set()) == found.failing({"dead_gradient"}) == ()


WHOLE = {"gives": "vocabulary", "sees": "distributions"}
KL_DIV = partial(nnf.kl_div, reduction="none")
AT_2 = "f(logits_p.mT / 2, (logits_q.mT / 2).softmax(1)) -> reverse_kl"
JS = replace(CONVENTIONS["log_probabilities"], name="js", claims="jensen_shannon")
REVERSE_KL_DIV = from_fields("reverse", "logp", "logq", claims="reverse_kl", **WHOLE)


@pytest.mark.parametrize(
    ("function", "convention", "arguments", "kinds", "named"),
    [
        (KL_DIV, "kl_div", {}, {"nan_value", "nan_gradient", "cancellation"}, "kleash.kl(logp, logq)"),
        (KL_DIV, "kl_div_log_target", {}, {"biased_value", "wrong_gradient"}, "kleash.kl(logp, logq)"),
        (KL_DIV, REVERSE_KL_DIV, {"log_target": True}, {"nan_value"}, "kleash.kl(logq, logp)"),
        (lambda p, q: p.clamp(-1) - q, "reward", {}, {"biased_value", "wrong_gradient"}, "without a clamp"),
        (lambda p, q: p - q, "reward", {}, {"negative_values"}, "leave it"),
        (lambda p, q: textbook(p.log_softmax(1), q.log_softmax(1)), "logits", {}, {"wrong_gradient"}, "axis"),
        (nnf.cross_entropy, AT_2, {"reduction": "none"}, {"wrong_gradient"}, "T * logits_p"),
        (lambda p, q: q - p, "reward", {}, {"wrong_gradient"}, "minus token reward"),
        (lambda p, q: textbook(q, p), "log_probabilities", {}, {"wrong_direction"}, "token loss reverse_kl"),
        (lambda p, q: (p - q).square(), "loss", {}, {"wrong_gradient"}, "remove the factor"),
        (lambda p, q: (q - p).exp() * (q - p), "metric", {}, {"wrong_direction"}, "k3 without a clamp"),
        (lambda p, q: (p - q).exp(), "metric", {}, {"other_divergence"}, "sampled_kl); if another"),
        (kleash.jensen_shannon, JS, {}, {"flat_value"}, "itself is bounded"),
    ],
)
def test_the_advice_fits_the_place_and_the_arguments_of_the_function(
    function, convention, arguments, kinds, named
):
    found = audit(function, convention, arguments=arguments).findings
    advice = {finding.kind: finding.remedy for finding in found}
    assert kinds <= advice.keys()
    assert all(named in advice[kind] for kind in kinds)
    of_places = {"reward": ["kl_loss"], "loss": [], "metric": ["kl_loss"]}
    absent = of_places.get(convention, ["sampled_kl", "k1", "k2", "k3"])
    assert not any(word in text for text in advice.values() for word in absent)


def test_unmasked_results_change_the_value_but_not_the_gradient():
    """The total is summed over unmasked positions, so masked results have no gradient."""
    rows = {row.case: row for row in audit(lambda p, q, mask: right(p, q), "loss_with_mask").masks}
    assert rows["other numbers"].value_change > 0.1
    assert rows["other numbers"].gradient_change == 0


def test_edge_rows_of_the_textbook_sum():
    rows = {row.case: row for row in audit(textbook, "log_probabilities").edges}
    assert rows["q rules out a token"].exact == rows["q rules out a token"].value == inf
    assert isnan(rows["p rules out a token"].value)
    assert rows["p rules out a token"].problem == "value is NaN"
    assert rows["p and q agree"].problem == ""
    assert rows["p and q agree"].value == 0
    expected = -torch.tensor(4.0).log().item() + 0.75 * 80
    assert rows["q is almost certain (80 nats)"].value == pytest.approx(expected, abs=1e-3)


def test_a_match_on_a_single_pair_is_not_enough():
    """The same value for another reason in a single world is not enough."""

    def column(*values):
        return torch.tensor([values], dtype=torch.float64).T

    def matched(*values, among=None):
        candidates = {"a": column(1.0, 2.0, 3.0), "b": column(1.0, 5.0, 6.0)}
        return match_quantity(column(*values), among or candidates, MODERATE_PAIRS, "a")

    assert matched(1.0, 7.0, 8.0) is None
    assert str(matched(2.0, 4.0, 6.0)) == "2 x a"
    assert str(matched(1.5, 5.5, 6.5)) == "b + 0.5"
    assert str(matched(-1.0, -5.0, -6.0)) == "-b"
    assert str(matched(1e-8, -1e-8, 0.0, among={"a": column(0.0, 0.0, 0.0)})) == "a"
    assert matched(nan, 5.0, 6.0) is None
