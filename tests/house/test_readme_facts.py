"""What README.md says of installed packages is what their sources say."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from documentation import ROOT

import kleash

CITATION = re.compile(r"^version: (\S+)$", re.MULTILINE)
NOT_FULL = r'if kl_penalty == "full":\n[^\n]*\n +raise NotImplementedError'
BACKWARD = r"backward_score = 0\.5 \* \(logprob - ref_logprob\)\.square\(\)"
LIGER = (r"use_bias_correction_kl=False", r"kl_div = k3_loss_fn\(")
NAMES = {"verl": "verl", "trl": "TRL", "liger-kernel": "Liger"}


@pytest.mark.peers("verl", "trl", "liger_kernel")
@pytest.mark.parametrize(
    ("package", "path", "patterns"),
    [
        ("verl", "verl/trainer/ppo/core_algos.py", (NOT_FULL, BACKWARD, r'"mse", "k2"')),
        ("trl", "trl/trainer/grpo_config.py", (r"use_bias_correction_kl: bool = field\(\s+default=True",)),
        ("trl", "trl/trainer/grpo_trainer.py", (r"torch\.exp\(ref_per_token_logps - per_token_logps\)",)),
        ("trl", "trl/kernels/chunked_divergence.py", (r"class ChunkedDivergenceFunction",)),
        ("liger-kernel", "liger_kernel/chunked_loss/grpo_loss.py", LIGER),
        ("liger-kernel", "liger_kernel/chunked_loss/jsd_loss.py", (r"class LigerFusedLinearJSDLoss",)),
    ],
)
def test_a_cell_of_the_table(package, path, patterns):
    module, _, rest = path.partition("/")
    (folder,) = find_spec(module).submodule_search_locations
    source = (Path(folder) / rest).read_text()
    for pattern in patterns:
        assert re.search(pattern, source), pattern
    assert f"| {NAMES[package]} {version(package)} |" in (ROOT / "README.md").read_text()


def test_the_citation_has_the_version():
    (cited,) = CITATION.findall((ROOT / "CITATION.cff").read_text())
    assert cited == kleash.__version__
