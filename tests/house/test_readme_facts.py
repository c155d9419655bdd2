"""What README.md says of installed packages is what their sources say."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import kleash

ROOT = Path(__file__).resolve().parents[2]
CITATION = re.compile(r"^version: (\S+)$", re.MULTILINE)
NAMES = {"verl": "verl", "trl": "TRL", "liger-kernel": "Liger"}


@pytest.mark.peers("verl", "trl", "liger_kernel")
@pytest.mark.parametrize(
    ("package", "module", "path", "patterns"),
    [
        (
            "verl",
            "verl",
            "trainer/ppo/core_algos.py",
            (
                r'if kl_penalty == "full":\n[^\n]*\n +raise NotImplementedError',
                r"backward_score = 0\.5 \* \(logprob - ref_logprob\)\.square\(\)",
                r'"mse", "k2"',
            ),
        ),
        ("trl", "trl", "trainer/grpo_config.py", (r"use_bias_correction_kl: bool = field\(\s+default=True",)),
        ("trl", "trl", "trainer/grpo_trainer.py", (r"torch\.exp\(ref_per_token_logps - per_token_logps\)",)),
        ("trl", "trl", "kernels/chunked_divergence.py", (r"class ChunkedDivergenceFunction",)),
        (
            "liger-kernel",
            "liger_kernel",
            "chunked_loss/grpo_loss.py",
            (r"use_bias_correction_kl=False", r"kl_div = k3_loss_fn\("),
        ),
        ("liger-kernel", "liger_kernel", "chunked_loss/jsd_loss.py", (r"class LigerFusedLinearJSDLoss",)),
    ],
)
def test_a_cell_of_the_table(package, module, path, patterns):
    spec = find_spec(module)
    assert spec is not None and spec.submodule_search_locations
    source = (Path(next(iter(spec.submodule_search_locations))) / path).read_text()
    for pattern in patterns:
        assert re.search(pattern, source), pattern
    assert f"| {NAMES[package]} {version(package)} |" in (ROOT / "README.md").read_text()


def test_the_citation_has_the_version():
    (cited,) = CITATION.findall((ROOT / "CITATION.cff").read_text())
    assert cited == kleash.__version__
