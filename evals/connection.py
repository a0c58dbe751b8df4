"""A connection to a server or a sidecar; what is wrong in a URL or a token is said at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blasst.evals.errors import InputError

if TYPE_CHECKING:
    import httpx


def base_url(url: str, option: str, example: str) -> str:
    """Without a slash or /v1 at its end. Raises InputError naming the option for what is no URL."""
    import httpx

    found = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parsed = httpx.URL(found)
    except (httpx.InvalidURL, ValueError, TypeError) as e:
        raise InputError(f"{option} {url!r} is not a URL ({e}); such as {example}") from e
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{option} {url!r} is not a URL; such as {example}")
    if parsed.query or parsed.fragment:
        raise InputError(f"{option} {url!r} has more than a path; such as {example}")
    return found


def bearer(token: str) -> dict[str, str]:
    """The header; none for an empty token. Raises InputError for what no header can hold."""
    if not token.isascii() or not token.isprintable():
        raise InputError("the token holds characters that no header can; give the token alone")
    return {"Authorization": f"Bearer {token}"} if token else {}


def connect(url: str, headers: dict[str, str], timeout_s: float) -> httpx.Client:
    """url: of base_url. Proxies of the environment are not used."""
    import httpx

    return httpx.Client(base_url=url, timeout=timeout_s, headers=headers, trust_env=False)
