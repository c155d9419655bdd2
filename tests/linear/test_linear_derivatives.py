"""Higher derivatives, forward mode and torch.func: right with the reference, an error with the others."""

from functools import cache
from itertools import product

import pytest
import torch
from compiling import compiles
from linear_cases import CHUNKED, CHUNKS, EVERY, REFERENCE, head_case
from torch.autograd import forward_ad

from kleash.divergences import DIVERGENCES
from kleash.errors import CannotRunError
from kleash.linear import (
    Head,
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
)
from kleash.linear.api import token_statistics_and_top

# of torch's own tracing
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CASE = head_case(torch.float64, tokens=(5,), vocab_size=11, bias=True)
WEIGHTS = torch.linspace(0.5, 2, 5, dtype=torch.float64)


def objective(terms, rows):
    return terms.kl - 0.1 * terms.entropy


DOORS = {
    "linear_kl": lambda m, o: linear_kl(*m, options=o),
    "linear_divergence": lambda m, o: linear_divergence(*m, divergence="hellinger", options=o),
    "linear_kl_loss": lambda m, o: linear_kl_loss(*m, weights=WEIGHTS, options=o).loss,
    "linear_divergence_loss": lambda m, o: (
        linear_divergence_loss(*m, weights=WEIGHTS, divergence="jeffreys", options=o).loss
    ),
    "linear_objective": lambda m, o: linear_objective(*m[:2], CASE.tokens, *m[2:], objective, options=o)[0],
    "token_statistics": lambda m, o: token_statistics(*m, CASE.tokens, options=o).kl_pq,
    "token_statistics_and_top": lambda m, o: (
        token_statistics_and_top(*m, CASE.tokens, top=2, options=o).statistics.kl_pq
    ),
}
VALUES = ("linear_kl", "linear_divergence")
WITHOUT_A_GRADIENT = ("token_statistics", "token_statistics_and_top")


def with_tensor(place, tensor):
    """The four arguments with one of the six tensors replaced."""
    p, q = CASE.head_p, CASE.head_q
    six = [CASE.hidden_p, p.weight, p.bias, CASE.hidden_q, q.weight, q.bias]
    six[place] = tensor
    return six[0], Head(*six[1:3]), six[3], Head(*six[4:])


def tensor_of(place):
    p, q = CASE.head_p, CASE.head_q
    return (CASE.hidden_p, p.weight, p.bias, CASE.hidden_q, q.weight, q.bias)[place]


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("name", DOORS)
def test_transforms_of_torch_func_raise_an_error(name, place):
    """Without the check, the tangent was None, which is 0, or torch raised an error about functions with out=."""
    for options in (CHUNKED, *([REFERENCE] if name not in VALUES else [])):
        for transform in TRANSFORMS.values():
            with pytest.raises(CannotRunError, match="inside torch"):
                transform(lambda x, o=options: DOORS[name](with_tensor(place, x), o), tensor_of(place))
        with forward_ad.dual_level(), pytest.raises(CannotRunError, match="forward-mode"):
            dual = forward_ad.make_dual(tensor_of(place), torch.ones_like(tensor_of(place)))
            DOORS[name](with_tensor(place, dual), options)


def test_tensors_that_are_not_transformed_work_inside_torch_func():
    """Tensors that are constants of the transform give the same values as outside of it."""
    for name in (*VALUES, "token_statistics"):
        door = DOORS[name]
        inside = torch.func.vmap(lambda x, f=door: x + f(CASE.models, CHUNKED).sum())(torch.zeros(2))
        torch.testing.assert_close(inside[0].double(), door(CASE.models, CHUNKED).sum(), rtol=1e-6, atol=0)
    trained = CASE.hidden_p.clone().requires_grad_()
    for door in DOORS.values():
        with pytest.raises(CannotRunError, match="inside torch"):
            torch.func.vmap(lambda x, f=door: x + f(with_tensor(0, trained), CHUNKED).sum())(torch.zeros(2))
    with forward_ad.dual_level():
        assert linear_kl(*CASE.models, options=CHUNKED).isfinite().all()


def test_tangents_of_weights_temperatures_and_the_data_of_an_objective_raise():
    ones = torch.ones(5, dtype=torch.float64)
    calls = (
        lambda x: linear_kl_loss(*CASE.models, weights=x, options=CHUNKED).loss,
        lambda x: linear_kl(*CASE.models, temperature=x, options=CHUNKED),
        lambda x: linear_objective(
            *CASE.models[:2], CASE.tokens, *CASE.models[2:], lambda t, r: x[r] * t.kl, options=CHUNKED
        )[0],
    )
    for call in calls:
        with pytest.raises(CannotRunError):
            torch.func.jvp(call, (ones,), (ones,))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n not in ("total_variation", "hellinger")])
def test_the_reference_has_every_derivative(name, tie):
    """Against the dense functions on explicit logits, at a point where both heads agree."""
    random = torch.Generator().manual_seed(1)
    h, g, weight = (torch.randn(*s, generator=random, dtype=torch.float64) for s in ((2, 3), (2, 3), (6, 3)))
    g = h.clone() if tie else g

    def ours(w):
        actual = linear_divergence(h, Head(w), g, Head(weight), divergence=name, options=REFERENCE)
        return actual.sum()

    def exact(w):
        from kleash.divergences import divergence

        logp, logq = ((x @ y.T).log_softmax(-1) for x, y in ((h, w), (g, weight)))
        return divergence(name, logp, logq).sum()

    expected = torch.autograd.functional.hessian(exact, weight)
    for actual in (torch.autograd.functional.hessian(ours, weight), torch.func.hessian(ours)(weight)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    value, tangent = torch.func.jvp(ours, (weight,), (h[:1] + weight,))
    torch.testing.assert_close(tangent, (torch.func.grad(exact)(weight) * (h[:1] + weight)).sum())
    batch = torch.func.vmap(ours)(torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(batch, torch.stack([value, ours(2 * weight)]))


@pytest.mark.parametrize("name", [n for n in DOORS if n not in WITHOUT_A_GRADIENT])
@EVERY
def test_a_second_derivative_is_right_or_raises(name, options):
    leaf = CASE.hidden_p.clone().requires_grad_()
    total = DOORS[name](with_tensor(0, leaf), options).sum()
    if options.impl == "reference":
        (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
        (actual,) = torch.autograd.grad(gradient.sum(), leaf)
        step = 1e-5
        sides = []
        for by in (step, -step):
            moved = (CASE.hidden_p + by).requires_grad_()
            sides.append(torch.autograd.grad(DOORS[name](with_tensor(0, moved), options).sum(), moved)[0])
        torch.testing.assert_close(actual, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-7)
    else:
        with pytest.raises(CannotRunError, match="differentiated once"):
            torch.autograd.grad(total, leaf, create_graph=True)


def test_log_probabilities_have_every_derivative():
    """They are computed by torch's functions from all logits."""
    weight, bias = CASE.head_p.weight, CASE.head_p.bias

    def ours(x):
        return log_probabilities(x, CASE.head_p).square().sum()

    def exact(x):
        return (x @ weight.T + bias).log_softmax(-1).square().sum()

    at = CASE.hidden_p
    expected = torch.autograd.functional.hessian(exact, at)
    for actual in (torch.autograd.functional.hessian(ours, at), torch.func.hessian(ours)(at)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    tangents = [torch.func.jvp(f, (at,), (at + 1,))[1] for f in (ours, exact)]
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("name", ["linear_kl", "linear_objective", "token_statistics"])
@pytest.mark.parametrize("options", [REFERENCE, CHUNKED], ids=["reference", "chunked"])
@compiles
def test_forward_mode_around_a_compiled_call_is_right_or_raises(compiler, unhooked, options, name):
    """Without the check, the tangent of a reference loss was None; the others raised an error about out=."""
    torch.compiler.reset()
    case = head_case(torch.float64, tokens=(5,), vocab_size=11, bias=True)

    def call(hidden):
        return DOORS[name]((hidden, *case.models[1:]), options).sum()

    at = case.hidden_p.clone().requires_grad_()
    exact = torch.autograd.grad(call(at), at)[0].sum() if name in VALUES else None
    compiled = torch.compile(call, backend="eager")
    compiled(case.hidden_p)
    for trained in (False, True):
        leaf = case.hidden_p.clone().requires_grad_(trained)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.ones_like(leaf))
            if options is REFERENCE and name in VALUES:
                tangent = forward_ad.unpack_dual(compiled(dual)).tangent
                torch.testing.assert_close(tangent.detach(), exact, rtol=1e-9, atol=1e-12)
            else:
                with pytest.raises(CannotRunError, match="forward-mode"):
                    compiled(dual)


@pytest.mark.parametrize("name", ["linear_kl", "linear_objective"])
@compiles
def test_a_second_derivative_of_a_compiled_call_raises(compiler, unhooked, name):
    """The operation raises the error; with an AOT backend, torch raises before it."""
    torch.compiler.reset()
    leaf = CASE.hidden_p.clone().requires_grad_()
    compiled = torch.compile(lambda x: DOORS[name](with_tensor(0, x), CHUNKED).sum(), backend="eager")
    (plain,) = torch.autograd.grad(compiled(leaf), leaf)
    torch.testing.assert_close(
        plain, torch.autograd.grad(DOORS[name](with_tensor(0, leaf), CHUNKED).sum(), leaf)[0]
    )
    with pytest.raises(CannotRunError, match="differentiated once"):
        torch.autograd.grad(compiled(leaf), leaf, create_graph=True)


@CHUNKS
@pytest.mark.parametrize("traits", [{}, {"bias": True, "softcap": 3.0}], ids=["plain", "softcap"])
def test_a_token_with_incoming_gradient_0_adds_0_to_every_gradient(options, traits):
    """Even if its hidden states are NaN: incoming gradient 0, weight 0, or not selected by an objective."""
    # one number, or all of them
    spoilt = list(product("pq", (torch.nan, torch.inf, -torch.inf), (3, slice(None))))
    case = head_case(torch.float64, tokens=(len(spoilt) + 6,), vocab_size=23, **traits)
    counted = torch.arange(len(spoilt) + 6) % 4 == 3
    counted[0] = counted[-1] = True
    for token, (side, number, where) in zip((~counted).nonzero()[:, 0].tolist(), spoilt, strict=True):
        getattr(case, f"hidden_{side}")[token, where] = number
    weights = torch.where(counted, 1.5, 0.0).double()
    p, q = case.head_p, case.head_q
    six = [case.hidden_p, p.weight, p.bias, case.hidden_q, q.weight, q.bias]

    def loss(name, tensors, keep):
        tensors = [x if x is None or len(x) != len(counted) else x[keep] for x in tensors]
        hp, wp, bp, hq, wq, bq = tensors
        head_p, head_q = (Head(w, b, softcap=p.softcap) for w, b in ((wp, bp), (wq, bq)))
        models, some = (hp, head_p, hq, head_q), counted[keep]
        if name == "values":
            actual = linear_kl(*models, options=options)
            return torch.where(some, actual * 1.5, 0.0).sum()
        if name == "hellinger":
            return linear_divergence(*models, divergence="hellinger", options=options)[some].sum()
        if name == "loss":
            return linear_kl_loss(*models, weights=weights[keep], options=options).loss
        return linear_objective(
            hp, head_p, case.tokens[keep], hq, head_q,
            lambda t, rows: torch.where(some[rows], t.kl - t.token_logp - 0.3 * t.entropy, 0.0), options=options,
        )[0]  # fmt: skip

    for name in ("values", "hellinger", "loss", "objective"):
        actual = []
        for keep in (torch.ones_like(counted), counted):
            leaves = [x if x is None else x.clone().requires_grad_() for x in six]
            expected = [x for x in leaves if x is not None]
            actual.append(torch.autograd.grad(loss(name, leaves, keep), expected))
        for ours, exact in zip(*actual, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@EVERY
def test_a_temperature_changed_after_the_forward_pass_changes_nothing(options):
    """Without a copy, the gradient was that of the new temperature, 75 % off; other tensors changed in place raise."""
    case = head_case(torch.float64, tokens=(5,), vocab_size=9)
    actual = []
    for changed in (False, True):
        weight, heat = case.head_p.weight.clone().requires_grad_(), torch.full((5,), 2.0, dtype=torch.float64)
        value = linear_kl(case.hidden_p, Head(weight), *case.models[2:], temperature=heat, options=options)
        if changed:
            heat.mul_(0.25)
        actual.append(torch.autograd.grad(value.sum(), weight)[0])
    torch.testing.assert_close(actual[1], actual[0], rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["bias", "hidden", "weight", "all"])
@pytest.mark.parametrize("door", ["values", "loss", "objective"])
def test_the_gradient_of_a_half_precision_tensor_of_both_models_is_rounded_once(options, dtype, what, door):
    """The two models' gradients nearly cancel; rounded separately, a bias's gradient was 12 % off."""
    gradients = shared_gradients(dtype, what, door, options), exact_shared_gradients(dtype, what, door)
    for ours, exact in zip(*gradients, strict=True):
        error = (ours - exact).norm() / exact.norm()
        assert error < 4e-3, f"{error:.2g}"


@cache
def exact_shared_gradients(dtype, what, door):
    return shared_gradients(dtype, what, door, None)


def shared_gradients(dtype, what, door, options):
    """The gradients of the tensors that both models share; without options, in float64 of the same rounded numbers."""
    wide = options is None
    case = head_case(torch.float64, tokens=(9,), vocab_size=31, distance=0.02, bias=True)
    p, q = case.head_p, case.head_q
    hidden_q, weight_q = case.hidden_q[:, :13], q.weight[:, :13]
    six = [case.hidden_p, p.weight, p.bias, hidden_q, weight_q, q.bias]
    six = [x.to(dtype) for x in six]
    for place, name in enumerate(("hidden", "weight", "bias")):
        if what in (name, "all"):
            six[place + 3] = six[place]
    if what == "all":
        six[5] = (six[2].double() * 1.02).to(dtype)

    known = {id(x): x.to(torch.float64 if wide else dtype).clone().requires_grad_() for x in six}
    hp, wp, bp, hq, wq, bq = (known[id(x)] for x in six)
    models, o = (hp, Head(wp, bp), hq, Head(wq, bq)), REFERENCE if wide else options
    ones = torch.ones(9, dtype=torch.float64 if wide else torch.float32)
    if door == "values":
        loss = linear_kl(*models, options=o).sum()
    elif door == "loss":
        loss = linear_kl_loss(*models, weights=ones, options=o).loss
    else:
        loss = linear_objective(hp, models[1], case.tokens, hq, models[3], lambda t, r: t.kl, options=o)[0]
    (2**12 * loss).backward()  # into the range of float16
    shared = [x for place, x in enumerate(six[:3]) if x is six[place + 3]]
    return [known[id(x)].grad.double() for x in shared]
