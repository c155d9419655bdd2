"""The folder of an attribution: the sums of each finished pass, so that an interrupted one can be resumed."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from kleash.errors import RunFolderError
from kleash.store.checksums import Checksums, begin_checksums, write_checked
from kleash.store.codec import encode, parse_json, to_json
from kleash.store.locks import taking_part

HEADER = "attribution.json"
"""What the passes are of, as ``opened`` compares it."""


class AttributionFolder:
    """The finished passes of one candidate, each in a JSON file with its checksum."""

    def __init__(self, root: Path) -> None:
        """Name the folder; nothing is read or written."""
        self.root, self._writer = root, token_hex(4)
        self._advice = f"remove {root} and run the sweep again with --resume"

    @contextmanager
    def opened(self, identity: Mapping[str, Any]) -> Generator[None]:
        """Context in which this process is one of those that add passes; those of something else are removed.

        Args:
            identity: what decides the numbers: settings, fingerprints, the hash of the source.

        Raises:
            RunFolderError: if the folder is damaged or cannot be written, or other processes add passes of something
                else.
        """
        header = encode(identity)

        def check(is_alone: bool | None) -> None:
            if (self.root / HEADER).exists():
                if self._parsed(self.root / HEADER) == header:
                    return
                if not is_alone:
                    raise RunFolderError(
                        f"{self.root} has passes of other options or files, which another process may be adding; "
                        "give another --out"
                    )
                for path in self.root.glob("*.json*"):
                    path.unlink(missing_ok=True)
            begin_checksums(self.root)
            write_checked(self.root, self.root / HEADER, to_json(header))

        with taking_part(self.root, check):
            yield

    def has(self, name: str) -> bool:
        """Whether a pass is finished."""
        return (self.root / f"{name}.json").exists()

    def read(self, name: str) -> list[list[Any]]:
        """The columns of a finished pass.

        Raises:
            RunFolderError: if its file is damaged.
        """
        return self._parsed(self.root / f"{name}.json")

    def write(self, name: str, columns: list[list[Any]]) -> None:
        """Write the columns of a finished pass.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_checked(self.root, self.root / f"{name}.json", to_json(columns), writer=self._writer)

    def _parsed(self, path: Path) -> Any:
        content = Checksums.read(self.root).read_bytes(path, self._advice)
        try:
            return parse_json(content)
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged: {error}; {self._advice}") from error
