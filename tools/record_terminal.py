"""Record a command's terminal as an SVG picture: what is on the screen when it ends.

    python tools/record_terminal.py docs/images/terminal.svg kleash measure --limit 24

The command runs in a terminal of its own, 100 columns wide; lines that it overwrites are left out. The picture has no
web font and no script.
"""

import argparse
import io
import os
import pty
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def screen_of(command: list[str]) -> str:
    """What a command leaves on its terminal, with colours."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    received = bytearray()

    def read(terminal: int) -> bytes:
        part = os.read(terminal, 65536)
        received.extend(part)
        return part

    if pty.spawn(command, read) != 0:
        raise SystemExit(f"{command[0]} failed")
    lines = received.decode().replace("\r\n", "\n").split("\n")
    lines = [re.split(r"\r|\x1b\[2K", line)[-1] for line in lines]
    return re.sub(r"\x1b\[(?:\?\d+[hl]|\d*[A-K])", "", "\n".join(lines))


def main() -> None:
    """Run the command and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold"), " ".join(args.command)))
    console.print(Text.from_ansi(screen_of(args.command)))
    picture = console.export_svg(title="kleash")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    args.out.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
