"""From the words of the command line to an exit code."""

import sys
from collections.abc import Sequence

from kleash.errors import KleashError
from kleash.extras import need
from kleash.version import __version__

DONE, FAILED, CANNOT, INTERRUPTED = 0, 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Run ``kleash``.

    Args:
        words: the arguments; those of the process if not given.

    Returns:
        0 done, 1 a check failed, 2 the request cannot be met, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if words is None else words)
    if arguments == ["--version"]:
        print(f"kleash {__version__}")
        return DONE
    try:
        return _run(arguments)
    except KleashError as error:
        print(f"kleash: {error}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt as stop:
        print(f"kleash: {stop or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # tyro's way to end after --help or a misspelt option
        return stop.code if isinstance(stop.code, int) else DONE


def _run(arguments: list[str]) -> int:
    tyro = need("tyro", "cli")
    need("rich", "cli")
    from kleash.cli import running
    from kleash.cli.commands import Command

    command = tyro.cli(
        Command,
        prog="kleash",
        description="KL divergence between language models: measured exactly and with error bars.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return running.run(command)
