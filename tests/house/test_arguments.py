"""Every public function of the lower floors: what it does not take is refused in a sentence; dtypes of results."""

import importlib
import inspect
from contextlib import suppress
from dataclasses import is_dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from kleash.divergences import kl, kl_from_probs, kl_gaussian, renyi, truncate
from kleash.errors import DetachedError, KleashError, ShapeError, VocabularyMismatchError
from kleash.leash import leave_one_out_advantages
from kleash.linear import Head, LinearOptions

PACKAGES = ("masking", "divergences", "estimators", "linear", "losses", "leash")
N, V = 3, 5


def kinds_of(annotation):
    """The jaxtyping classes that an annotation allows."""
    options = get_args(annotation) or (annotation,)
    return [x for x in options if getattr(x, "array_type", None) is Tensor]


def public_functions():
    for package in PACKAGES:
        module = importlib.import_module(f"kleash.{package}")
        for name in getattr(module, "__all__", ["as_mask", "mean_of"]):
            function = getattr(module, name)
            if inspect.isfunction(function) and any(
                kinds_of(p.annotation) for p in inspect.signature(function).parameters.values()
            ):
                yield pytest.param(function, id=f"{package}.{name}")


def good(parameter):
    """An argument of the right type, whose shape may not fit the others."""
    kinds = kinds_of(parameter.annotation)
    if kinds:
        dims, dtypes = kinds[0].dim_str, kinds[0].dtypes
        shape = (N, V) if "vocab" in dims or "dim" in dims or "time" in dims else (N,)
        if any("float" in x for x in dtypes):
            return -torch.rand(shape)
        return torch.ones(shape, dtype=torch.bool if "bool" in dtypes else torch.int64)
    given = {Head: Head(torch.rand(V, V)), LinearOptions: LinearOptions(), int: 1}
    return given.get(parameter.annotation, 0.5)


KINDS = {
    "list": Tensor.tolist,
    "numpy": Tensor.numpy,
    "int": lambda tensor: 1,
    "none": lambda tensor: None,
    "text": lambda tensor: "kl",
    "complex": lambda tensor: tensor.to(torch.complex64),
    "sparse": Tensor.to_sparse,
    "integers": lambda tensor: tensor.to(torch.int64),
    "truth values": lambda tensor: tensor.to(torch.bool),
    "another device": lambda tensor: tensor.to("meta"),
}
"""What people give where a tensor is taken."""


def may_take(kind, parameter, tensors):
    """Whether that is allowed there after all."""
    options = get_args(parameter.annotation)
    dtypes = kinds_of(parameter.annotation)[0].dtypes
    if kind == "none" and type(None) in options:
        return True
    if kind == "int" and (float in options or int in options):
        return True
    if kind == "another device" and tensors == 1:
        return True
    numbers = {x for k in kinds_of(parameter.annotation) for x in k.dtypes}
    if kind == "integers":
        return any("int" in x for x in numbers)
    return kind == "truth values" and ("bool" in numbers or not any("float" in x for x in dtypes))


@pytest.mark.parametrize("function", list(public_functions()))
def test_what_is_no_tensor_of_the_right_kind_is_refused_in_a_sentence(function, unhooked):
    """Lists and arrays had no attribute of a tensor's, and that was the message."""
    parameters = {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if p.default is inspect.Parameter.empty or kinds_of(p.annotation)
    }
    tensors = [name for name, p in parameters.items() if kinds_of(p.annotation)]
    for name in tensors:
        for kind in KINDS:
            if may_take(kind, parameters[name], len(tensors)):
                continue
            arguments = {other: good(p) for other, p in parameters.items()}
            arguments[name] = KINDS[kind](arguments[name])
            with pytest.raises(KleashError) as caught:
                function(**arguments)
            assert "\n" not in str(caught.value), kind


def tensor_of(parameter, sizes, longer=None):
    """A tensor with the axes of an annotation; one longer along the axis ``longer``."""
    kind = kinds_of(parameter.annotation)[0]
    axes = kind.dim_str.split()
    shape = [sizes.setdefault(axis, 2 + len(sizes)) + (axis == longer) for axis in axes]
    if any("float" in x for x in kind.dtypes):
        return -torch.rand(shape)
    return torch.ones(shape, dtype=torch.bool if "bool" in kind.dtypes else torch.int64)


@pytest.mark.parametrize("function", list(public_functions()))
def test_axes_of_one_name_have_one_size(function, unhooked):
    parameters = inspect.signature(function).parameters
    tensors = {n: kinds_of(p.annotation)[0].dim_str for n, p in parameters.items() if kinds_of(p.annotation)}
    # Records are tested where they are defined.
    records = any(hasattr(p.annotation, "_fields") for p in parameters.values())
    if records or len(tensors) < 2 or any("..." in axes for axes in tensors.values()):
        return
    needed = {
        n: p for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in tensors
    }
    others = {n: "kl" if n == "which" else good(p) for n, p in needed.items()}
    for name, axes in tensors.items():
        shared = {axis for other, theirs in tensors.items() if other != name for axis in theirs.split()}
        for axis in set(axes.split()) & shared:
            sizes = {}
            given = {n: tensor_of(parameters[n], sizes, axis if n == name else None) for n in tensors}
            for one in (given[name], given[name][0]):  # of another size, and with an axis less
                with pytest.raises((ShapeError, VocabularyMismatchError)):
                    function(**others, **(given | {name: one}))


SETTINGS = {"which": "kl", "bounds": (0.5, 2.0)}
"""Arguments whose annotation does not say what they are."""
OTHER_DTYPES = (
    *("phi", "absolute", "k1", "k2", "k3"),
    *("to_full", "to_truncated", "shared_head", "aggregate", "kl_bounds"),
)
"""Functions that keep the dtype of what they are given; the last computes in float64."""
OF_RECORDS = ("sampled_tail_loss", "tail_bucket_loss", "intersection")


def matching_arguments(function, dtype):
    """Arguments whose tensors have matching axes, floating-point ones in ``dtype``; distributions are normalised."""
    torch.manual_seed(0)
    sizes, given = {}, {}
    for name, parameter in inspect.signature(function).parameters.items():
        kinds = kinds_of(parameter.annotation)
        if kinds:
            # One for each sequence: the other shape that is allowed is one for each token.
            value = torch.ones(2) if name == "advantages" else tensor_of(parameter, sizes)
            if value.is_floating_point():
                is_distribution = "vocab" in kinds[0].dim_str.split()[-1]
                value = (value.log_softmax(-1) if is_distribution else value).bfloat16().to(dtype)
            given[name] = value
        elif parameter.default is inspect.Parameter.empty:
            given[name] = SETTINGS.get(name, good(parameter))
    return given


def floats_of(result):
    """The floating-point tensors of a result."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if is_dataclass(result):
        result = tuple(vars(result).values())
    return [x for part in result for x in floats_of(part)] if isinstance(result, tuple) else []


COMPUTED = [
    case
    for case in public_functions()
    if not case.id.startswith(("masking.", "linear."))
    and case.values[0].__name__ not in (*OTHER_DTYPES, *OF_RECORDS)
]


@pytest.fixture(params=(torch.float32, torch.float64, torch.bfloat16), ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("function", COMPUTED)
@pytest.mark.usefixtures("default_dtype")
@torch.no_grad()
def test_half_precision_is_computed_in_float32(function):
    """A difference of log-probabilities in bfloat16 loses most of a small KL. Torch's defaults have no part in it."""
    both = [matching_arguments(function, dtype) for dtype in (torch.bfloat16, torch.float32)]
    with torch.device("meta"):
        results = [floats_of(function(**given)) for given in both]
    for half, single in zip(*results, strict=True):
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, single, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function", [case for case in COMPUTED if case.id.startswith(("leash.", "estimators.importance"))]
)
def test_rewards_advantages_and_weights_are_detached(function):
    given = matching_arguments(function, torch.bfloat16)
    leaves = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    assert leaves and not any(x.requires_grad for x in floats_of(function(**given)))


@pytest.mark.parametrize("function", COMPUTED)
def test_constants_may_come_from_inference_mode(function):
    """As a reference's log-probabilities often do: autograd refused to save them."""
    given = matching_arguments(function, torch.float32)
    with torch.inference_mode():
        constants = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
    for name in [name for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()]:
        trained, slopes = given[name].clone().requires_grad_(), []
        for others in (given, constants):
            with suppress(DetachedError):  # of the losses, which need a gradient of their first argument
                totals = [x.sum() for x in floats_of(function(**others | {name: trained})) if x.requires_grad]
                slopes.append(torch.autograd.grad(totals, trained) if totals else ())
        torch.testing.assert_close(*(slopes or ((), ())), equal_nan=True)


def test_the_sentences_say_what_was_given_and_what_to_give(unhooked):
    logp = torch.zeros(2, 3).log_softmax(-1)
    for call, sentence in (
        (lambda: kl([0.1], [0.2]), "logp is a list and not a torch.Tensor; convert it"),
        (lambda: kl(logp, np.zeros((2, 3))), "logq is a numpy.ndarray and not a torch.Tensor"),
        (lambda: kl(logp, logp.to("meta")), "logp is on cpu and logq on meta; move one"),
        (lambda: kl(logp.to_sparse(), logp), "logp is a tensor of layout torch.sparse_coo"),
        (lambda: leave_one_out_advantages(logp[0], [1, 1]), "groups is [1, 1]; give a number or a torch.T"),
        (lambda: renyi(logp, logp, [2.0]), "order is [2.0]; give a number"),
        (lambda: renyi(logp, logp, torch.ones(2)), "order is a torch.Tensor of several numbers;"),
        (lambda: truncate(logp, top_k=1.5), "top_k is 1.5; give a whole number"),
        (lambda: leave_one_out_advantages(logp[0], 1.5), "groups is 1.5; give a whole number"),
        (
            lambda: kl_gaussian(logp[0, 0], logp, logp.to("meta")),
            "log_variance_p is on cpu and mean_q on meta",
        ),
        (lambda: Head([[1.0]]), "weight is a list and not a torch.Tensor"),
    ):
        with pytest.raises(KleashError) as caught:
            call()
        assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("function", list(public_functions()))
def test_a_vocabulary_without_a_token_is_refused(function, unhooked):
    """Of such distributions the Renyi divergence was -inf, and others 0 or an error of torch's."""
    parameters = inspect.signature(function).parameters
    kinds = {name: kinds_of(p.annotation) for name, p in parameters.items()}
    covers = [name for name in kinds if any(k.dim_str.split()[-1:] == ["vocab"] for k in kinds[name])]
    if not covers:
        return
    arguments = {n: good(p) for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    arguments |= {"which": "kl"} if "which" in parameters else {}
    arguments |= {name: torch.zeros(N, 0) for name in covers}
    with pytest.raises(KleashError, match="at least one token"):
        function(**arguments)


def test_probabilities_inside_vmap_are_refused_in_a_sentence():
    with pytest.raises(KleashError, match="vmap"):
        torch.func.vmap(kl_from_probs)(torch.full((2, 4), 0.25), torch.full((2, 4), 0.25))
