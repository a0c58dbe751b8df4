"""A folder whose files always belong to one run: written beside, put in place at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from blasst.evals.errors import InputError

_UNFINISHED = "unfinished"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OutputFolder:
    """A context manager. `partial` is where to write; publish() moves `names` into `folder`.

    Without publish() the files of the run before stay as they are, and a line on stderr says where
    those of this one are. Other files in `folder` are never touched.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.partial = folder, folder / _UNFINISHED
        self._names = names
        self._lock: int | None = None
        self._published = False

    def __enter__(self) -> OutputFolder:
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in self._names:
                (self.partial / name).unlink(missing_ok=True)
        except BlockingIOError as e:
            self._unlock()
            raise InputError(
                f"{self.folder} is in use by another run; wait, or give another --out"
            ) from e
        except OSError as e:
            self._unlock()
            raise InputError(
                f"{self.folder} cannot be written: {e.strerror}; give another --out"
            ) from e
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._published:
            with contextlib.suppress(OSError):
                self.partial.rmdir()
        elif any((self.partial / name).exists() for name in self._names):
            print(
                f"blasst: what this run wrote is in {self.partial}; an earlier report in "
                f"{self.folder} is as it was",
                file=sys.stderr,
            )
        self._unlock()

    def publish(self) -> None:
        """Put the files in place. A signal waits until it is done; a process killed on the way
        leaves some of the files missing, but never files of two runs."""
        with _signals_wait():
            try:
                for name in self._names:
                    (self.folder / name).unlink(missing_ok=True)
                for name in reversed(self._names):
                    if (self.partial / name).exists():
                        (self.partial / name).replace(self.folder / name)
            except OSError as e:
                raise InputError(
                    f"{self.folder} cannot be written: {e.strerror}; give another --out"
                ) from e
            self._published = True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """The first signal that comes meanwhile is raised again at the end."""
    # Not with a signal mask: it holds for one thread, and any other would take the signal.
    caught: list[int] = []
    before = [(n, signal.signal(n, lambda number, _: caught.append(number))) for n in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
