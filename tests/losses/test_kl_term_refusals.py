"""Terms that would train something else, and the reason that each is refused with."""

import pytest

from kleash.errors import OptionError, UnknownNameError
from kleash.estimators import bounded_k3
from kleash.losses import KLTerm

REFUSED = [
    ({"estimator": "k1", "gradient": "backpropagated"}, "k1 backpropagated trains nothing: its gradient"),
    ({"estimator": "k3", "gradient": "backpropagated"}, r"k3 backpropagated follows KL\(q ‖ p\), not KL\(p"),
    ({"estimator": "abs", "gradient": "backpropagated"}, r"abs backpropagated follows sum \|p - q\|"),
    ({"estimator": "k2", "gradient": "ratio_attached", "ratio": "token"}, r"rho \* k2 with the ratio"),
    ({"estimator": "abs", "gradient": "ratio_attached", "ratio": "token"}, r"rho \* abs with the ratio"),
    ({"gradient": "ratio_attached"}, "and no ratio; name the ratio"),
    ({"gradient": "ratio_attached", "ratio": "token", "cap": 2.0}, "a ratio capped at 2.0 has no gradient"),
    ({"gradient": "ratio_attached", "ratio": "prefix"}, "'prefix' that carries a gradient is of scope"),
    ({"gradient": "ratio_attached", "ratio": "token", "scope": "sequence"}, "is of scope 'token', not"),
    ({"gradient": "none"}, "a loss without a gradient trains nothing"),
    ({"estimator": "exact", "gradient": "score"}, "the exact KL has its own gradient"),
    ({"follows": "KL(q ‖ p)"}, r"gradient 'score' follows KL\(p ‖ q\), and KL\(q ‖ p\) was asked for"),
    ({"estimator": "k3", "place": "reward"}, "k3 as a reward does not have the gradient"),
    ({"estimator": "k2", "place": "reward"}, "k2 as a reward does not have"),
    ({"estimator": "abs", "place": "reward"}, "take estimator 'k1', or place 'loss'"),
    ({"estimator": "exact", "place": "reward"}, "lacks the gradient of each token's own KL"),
    ({"estimator": "k1", "place": "reward", "gradient": "score"}, "a reward is detached, so gradient"),
    ({"estimator": "k1", "place": "reward", "ratio": "token"}, "it belongs on the policy loss that the"),
    ({"estimator": "k1", "ratio": "before"}, "ratio 'before' leaves out the token that k1 was sampled from"),
    ({"scope": "sequence", "aggregation": "sequence_mean"}, "'sequence_mean' divides each response by its"),
    ({"scope": "sequence", "ratio": "token"}, "averages over the behaviour's prefixes, which training does"),
    ({"scope": "sequence", "estimator": "k2"}, "makes the value of k2 part of the gradient of earlier"),
    ({"scope": "sequence", "estimator": bounded_k3(-5.0)}, "makes the value of this estimator part of the"),
    ({"estimator": bounded_k3(-5.0), "gradient": "backpropagated"}, "this estimator backpropagated follows"),
    (
        {"estimator": "k3", "gradient": "backpropagated", "follows": "KL(q ‖ p)", "scope": "sequence"},
        r"known for KL\(p ‖ q\) only",
    ),
    ({"cap": 2.0}, "cap is 2.0 and there is no ratio that it could bound"),
    ({"place": "advantage"}, "place is 'advantage'; there are loss, reward"),
    ({"gradient": "straight"}, "gradient is 'straight'; there are score, backpropagated"),
    ({"ratio": "all"}, "ratio is 'all'; there are none, token, before, prefix, sequence"),
    ({"scope": "batch"}, "scope is 'batch'; there are token, sequence"),
    ({"aggregation": "constant"}, "length is None; give the number of tokens"),
    ({"length": 5}, "length is 5, which 'token_mean' does not use"),
    ({"cap": 0, "ratio": "token"}, "cap is 0; give a weight above 0"),
    ({"estimator": "k5"}, "called 'k5'; there are k1, abs, k2, k3"),
    ({"aggregation": "mean"}, "no aggregation is called 'mean'"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused_terms_give_their_reason(fields, reason, unhooked):
    with pytest.raises((OptionError, UnknownNameError), match=reason) as caught:
        KLTerm(**fields)
    said = str(caught.value)
    assert said[0].islower() or said.startswith("k") or said[0] == "'"
    assert not said.endswith(".") and "\n" not in said
