"""Who may call what: an ASGI gate in front of the whole application, closed by default.

It looks at the path of the ASGI scope, which routing uses too, never at a URL built from the Host
header. Open are GET and HEAD of the exact paths listed; all else needs the token, where one is set.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from blasst.server.limits import Bucket, Limits, retry_after
from blasst.server.problems import Problem
from blasst.server.settings import is_loopback
from blasst.server.tally import Tally
from blasst.server.tokens import Role, Tokens

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16 * 1024
_READS = ("GET", "HEAD")
_PROBES = ("/healthz", "/readyz")


class Gate:
    """Token, Host, rate and body-size checks. tokens None: no token is configured."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens | None,
        open_paths: Collection[str],
        limits: Limits,
        tally: Tally,
    ) -> None:
        self.app = app
        self.tokens = tokens
        self.open_paths = frozenset(open_paths)
        self.limits = limits
        self.tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
            receive = _limited(scope, receive)
        except Problem as refusal:
            self.tally.error(refusal.kind, refusal.detail)
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        try:
            role = self._role(scope)
        except Problem as refusal:
            _spend(self.limits.refused.take(_address(scope)), refusal)
            raise
        scope.setdefault("state", {})["role"] = role
        if scope["path"] in _PROBES:
            # Or a flood of reads would have us restarted as dead.
            return
        reads = scope["method"] in _READS
        _take(self.limits.reads if reads else self.limits.writes)

    def _role(self, scope: Scope) -> Role | None:
        """Which token the caller has; None: none is needed. Raises Problem."""
        if self.tokens is None:
            _check_host(scope)
            return None
        reads = scope["method"] in _READS
        if reads and scope["path"] in self.open_paths:
            return None
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        role = self.tokens.role(token.strip())
        if role is None or scheme.lower() != b"bearer":
            raise Problem(
                401,
                "unauthorized",
                "This needs the header `Authorization: Bearer TOKEN` with the configured token.",
                {"WWW-Authenticate": 'Bearer realm="blasst"'},
            )
        if role == "read" and not reads:
            raise Problem(
                403, "read-only", "This token may only read; a change needs the write token."
            )
        return role


def _take(bucket: Bucket) -> None:
    wait = bucket.take()
    if wait:
        raise Problem(
            429,
            "too-many",
            f"More than {bucket.rate:g} such calls a second; try again after Retry-After seconds.",
            retry_after(wait),
        )


def _spend(wait: float, refusal: Problem) -> None:
    """A caller who is refused all the time is told to wait. The right token is never refused for
    others' guesses: they may share its address."""
    if wait:
        raise Problem(
            429, "too-many-refused", f"Too many refused calls. {refusal.detail}", retry_after(wait)
        ) from refusal


def _address(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "local"


def _check_host(scope: Scope) -> None:
    # Without a token only loopback is listened on. A web page whose name was made to resolve to
    # 127.0.0.1 would still reach us from a browser; its Host header gives it away.
    host = _header(scope, b"host").decode("latin-1").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise Problem(
            403, "foreign-host", "Without a token only loopback names are served (Host header)."
        )


def _limited(scope: Scope, receive: Receive) -> Receive:
    refusal = Problem(413, "too-large", f"A body has at most {MAX_BODY_BYTES} bytes.")
    announced = _header(scope, b"content-length")
    if announced.isdigit() and int(announced[:20]) > MAX_BODY_BYTES:
        raise refusal
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise refusal
        return message

    return limited


def _header(scope: Scope, name: bytes) -> bytes:
    """The header, or nothing when it is absent or was sent twice: no choice, so no trick."""
    values = [value for key, value in scope["headers"] if key == name]
    return bytes(values[0]) if len(values) == 1 else b""
