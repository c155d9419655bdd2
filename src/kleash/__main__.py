"""``python -m kleash`` is ``kleash``."""

import sys

from kleash.cli import main

if __name__ == "__main__":
    sys.exit(main())
