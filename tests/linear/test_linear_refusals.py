"""Invalid arguments raise an error with the values of both sides."""

import pytest
import torch
from linear_cases import head_case
from torch._subclasses import FakeTensor, FakeTensorMode

from kleash.errors import CannotRunError, OptionError, ShapeError, UnknownNameError, VocabularyMismatchError
from kleash.linear import (
    Head,
    LinearOptions,
    compiled_rows,
    linear_kl,
    log_probabilities,
    rows,
    token_statistics,
)

pytestmark = pytest.mark.usefixtures("unhooked")
W = torch.randn(9, 4)
H = torch.randn(5, 4)
MPS = FakeTensor(FakeTensorMode(), torch.empty(5, 9, device="meta"), torch.device("mps"))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Head(torch.randn(4)), ShapeError, r"weight \(4,\); give weight \[rows, dim\]"),
        (lambda: Head(W, torch.randn(8)), ShapeError, r"do not fit together: weight \(9, 4\), bias \(8,\)"),
        (lambda: Head(W, softcap=0.0), OptionError, "softcap is 0.0; give a finite"),
        (lambda: Head(W, scale=float("nan")), OptionError, "finite number, not nan"),
        (lambda: LinearOptions(impl="chunkd"), UnknownNameError, "did you mean 'chunked'"),
        (lambda: LinearOptions(compile="always"), OptionError, "compile is 'always'; there are True, False"),
        (lambda: linear_kl(H, Head(W.to("meta")), H, Head(W)), CannotRunError, "p and its head are on cpu"),
        (lambda: log_probabilities(MPS, Head(None)), CannotRunError, "mps has no float64"),
        (lambda: LinearOptions(buffer_bytes=0), OptionError, "buffer_bytes is 0"),
        (lambda: linear_kl(H, Head(None), H, Head(W)), VocabularyMismatchError, "one head covers 4 tokens"),
        (lambda: linear_kl(H, Head(W), H, Head(W), temperature=0.0), OptionError, "temperature is 0.0; give"),
        (lambda: linear_kl(H[:, :0], Head(None), H[:, :0], Head(None)), ShapeError, "cover no token at all"),
        (lambda: log_probabilities(H, Head(W[:, :2])), ShapeError, "have 4 dimensions and its head 2"),
        (lambda: log_probabilities(H, Head(None, torch.zeros(3))), ShapeError, "4 tokens and its head's"),
    ],
)
def test_invalid_arguments_raise(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("last", "says"), [(9, "from 0 to 9 and the heads cover 9; give"), (-100, "from -100 to 3")]
)
def test_invalid_token_ids_raise(last, says):
    with pytest.raises(VocabularyMismatchError, match=says):
        token_statistics(H, Head(W), H, Head(W), torch.tensor([0, 1, 2, 3, last]))


def test_compiling_without_a_compiler_raises_and_auto_does_not_compile(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiled_rows, "which", lambda name: None)
    compiled_rows.missing_for_compiling.cache_clear()
    case = head_case(torch.float64)
    with pytest.raises(CannotRunError, match=r"C\+\+ compiler \(no-such-compiler\), which is not there"):
        case.kl(LinearOptions(compile=True))
    assert "a C compiler (" in compiled_rows.missing_for_compiling("cuda")  # else Triton raises
    monkeypatch.setattr(compiled_rows, "PAYS_FROM", 1)
    assert torch.equal(case.kl(), case.kl(LinearOptions(compile=False)))
    compiled_rows.missing_for_compiling.cache_clear()


def test_auto_compiles_only_calls_that_save_time(monkeypatch):
    case = head_case(torch.float64, tokens=(37,), vocab_size=101)
    compiled = []
    monkeypatch.setattr(compiled_rows, "missing_for_compiling", lambda device: None)
    monkeypatch.setattr(
        "kleash.linear.chunked.compiled",
        lambda function, device: compiled.append(function) or getattr(rows, function.__name__),
    )
    for work, times in ((37 * 101 + 1, 0), (37 * 101, 1)):
        monkeypatch.setattr(compiled_rows, "PAYS_FROM", work)
        case.kl()
        assert len(compiled) == times
