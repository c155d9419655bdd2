"""The mark of a test that compiles."""

import pytest

# What torch deprecates in its own compiler: it is raised there, and is no caller's doing.
OF_TORCH_ITSELF = (
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning",
    "ignore:`torch.jit.script_method` is deprecated",
    r"ignore:\s*Online softmax is disabled:UserWarning",
)


def compiles(test):
    """Mark ``test`` as one that needs a C++ compiler (it takes the fixture ``compiler``)."""
    return pytest.mark.compiler(pytest.mark.filterwarnings(*OF_TORCH_ITSELF)(test))
