"""uvicorn's HTTP connection with an end to patience: nobody holds a connection for nothing.

uvicorn limits only the time between two requests. Without this, clients that connect and say
nothing, send a header a minute or never read an answer take every connection there is.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10.0
"""From the connection, or from the last answer on it, to the end of the next request's headers."""

ANSWER_TIMEOUT_S = 30.0
"""From the headers of a request until its answer is taken."""

SPARE_FILES = 128


def most_connections(open_files: int) -> int:
    """2,048, or what a limit of open files leaves for connections. -1: no limit."""
    return 2048 if open_files < 0 else max(64, min(2048, open_files - SPARE_FILES))


MOST_CONNECTIONS = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""Above it the connection that has waited longest without a request makes room."""

HEADER_BYTES = 16 * 1024


class Connection(H11Protocol):
    """One connection; `_since` is when it last changed between waiting and answering."""

    _since = 0.0
    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        waited = not self.busy
        super().handle_events()
        if waited and self.busy:
            self._restart()

    def on_response_complete(self) -> None:
        self._restart()
        super().on_response_complete()

    @property
    def busy(self) -> bool:
        """A request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _restart(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._since = self.loop.time()
        patience = ANSWER_TIMEOUT_S if self.busy else REQUEST_TIMEOUT_S
        self._watch = self.loop.call_later(patience, self._cut)

    def _cut(self) -> None:
        # Not close: that would wait until the client has taken what is buffered.
        self.transport.abort()

    def _make_room(self) -> None:
        idle = [c for c in self.connections if isinstance(c, Connection) and not c.busy]
        # The newest never goes: it has had no time to ask.
        others = [c for c in idle if c is not self]
        if others:
            min(others, key=lambda c: c._since)._cut()
