"""Results in a file: JSON lines, each a record that stands for itself, appended as they come."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from ..errors import VeloxError

#: What a record may be about. What else it holds, the module of that name says.
KINDS = ("perplexity", "passkey", "retention", "positions", "bench")


class Results:
    """A file of results, which a stopped run leaves whole and goes on with.

    Every record has ``kind`` (one of ``KINDS``), ``model`` (its name, as given) and ``velox`` (the
    version that measured it). One file may hold all kinds. Several processes may append to it.

    Args:
        path: the file; it needn't be there yet, its folder must.

    Raises:
        VeloxError: there is no such folder, or the file can't be read or written, or a line of it
            isn't a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.parent.is_dir():
            raise VeloxError(f"no folder {path.parent} for the results: make it, or name another")
        self.records()  # what is wrong with the file shows before hours are spent

    def records(self) -> list[dict[str, Any]]:
        """All records, in the order of the file. A last line that was cut off isn't one."""
        return self._read()[0]

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The newest record with these values, or None."""
        # A tuple comes back from the file as a list.
        wanted: dict[str, Any] = json.loads(json.dumps(key))
        found = [record for record in self.records() if record.items() >= wanted.items()]
        return found[-1] if found else None

    def append(self, record: dict[str, Any]) -> None:
        """Write the record, with velox's version, as a whole line after the last whole one.

        Args:
            record: what JSON can hold; ``kind`` and ``model`` must be among it.
        """
        from .. import __version__

        assert record.get("kind") in KINDS, f"kind={record.get('kind')!r}: one of {KINDS}"
        assert isinstance(record.get("model"), str), "a record names its model"
        line = json.dumps({**record, "velox": __version__}, allow_nan=False, ensure_ascii=False)
        try:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                whole = self._read()[1]
                file.truncate(whole)
                ended = not whole or self.path.read_bytes()[-1:] == b"\n"
                file.write(f"{'' if ended else chr(10)}{line}\n".encode())
        except OSError as error:
            raise VeloxError(f"can't write {self.path}: {error.strerror}") from error

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The records, and the bytes up to the end of the last whole line."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise VeloxError(f"can't read {self.path}: {error.strerror}") from error
        records, whole = [], 0
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            record = _record(line)
            if record is None and not line.endswith(b"\n"):
                break  # cut off: the run was stopped as it wrote
            if record is None and line.strip():
                raise VeloxError(
                    f"line {number} of {self.path} isn't a result: wanted a JSON object whose "
                    f"'kind' is one of {', '.join(KINDS)}. Mend the line, or name another file."
                )
            whole += len(line)
            if record is not None:
                records.append(record)
        return records, whole


def _record(line: bytes) -> dict[str, Any] | None:
    """The record that a line holds, or None."""
    try:
        record: Any = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one, too
        return None
    fits = isinstance(record, dict) and record.get("kind") in KINDS and "model" in record
    return dict(record) if fits else None
