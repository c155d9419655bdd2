"""The folder of an attribution: the sums of each finished pass, so that an interrupted one can be resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.store.atomic import cannot_write, remove_folder
from kleash.store.checksums import Checksums, begin_checksums, write_checked
from kleash.store.codec import encode, parse_json, to_json

HEADER = "attribution.json"
"""What the passes are of, as ``open`` compares it."""


class AttributionFolder:
    """The finished passes of one candidate, each in a JSON file with its checksum."""

    def __init__(self, root: Path) -> None:
        """Name the folder; nothing is read or written."""
        self.root = root
        self._advice = f"remove {root} and run the sweep again with --resume"

    def open(self, identity: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
        """The columns of the finished passes by name; without any if those in the folder are of something else.

        Args:
            identity: what decides the numbers: settings, fingerprints, the hash of the source.

        Raises:
            RunFolderError: if the folder is damaged or cannot be written.
        """
        header = {"checksums": True, **encode(identity)}
        if (self.root / HEADER).exists():
            checksums = Checksums.read(self.root, HEADER)
            if self._parsed(checksums, self.root / HEADER) == header:
                paths = [path for path in sorted(self.root.glob("*.json")) if path.name != HEADER]
                return {path.stem: self._parsed(checksums, path) for path in paths}
            try:
                remove_folder(self.root)
            except OSError as error:
                raise cannot_write(self.root, error) from error
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.root, error) from error
        begin_checksums(self.root)
        write_checked(self.root, self.root / HEADER, to_json(header))
        return {}

    def write(self, name: str, columns: list[list[Any]]) -> None:
        """Write the columns of a finished pass.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_checked(self.root, self.root / f"{name}.json", to_json(columns))

    def _parsed(self, checksums: Checksums, path: Path) -> Any:
        content = checksums.read_bytes(path, self._advice)
        try:
            return parse_json(content)
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged: {error}; {self._advice}") from error
