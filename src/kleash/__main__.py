"""``python -m kleash`` is ``kleash``."""

import sys

from kleash.cli import run_process

if __name__ == "__main__":
    sys.exit(run_process())
