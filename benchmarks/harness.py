"""What every benchmark writes beside its figures: when, where, with what, and by which command."""

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write ``results/name.json`` and return its path."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"figures": figures, **circumstances()}, indent=2) + "\n")
    return path


def circumstances() -> dict[str, Any]:
    """Date, machine, versions, commit and command."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _said(["git", "rev-parse", "--short", "HEAD"]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent)
    return done.stdout.strip()
