"""HTTP from here to an address that the operator fixed: no redirects, no proxies, a size limit."""

from __future__ import annotations

import ssl
import time
import urllib.request
from http.client import HTTPResponse
from typing import Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it points."""

    def redirect_request(self, *args: Any) -> None:
        return None


def opener(tls: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """A proxy of the environment is for the network outside; what is asked here is not there."""
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        _NoRedirect(),
        urllib.request.HTTPSHandler(context=tls),
    )


def read_bounded(answer: HTTPResponse, most: int, patience_s: float) -> bytes:
    """The body. Raises ValueError when it is larger, TimeoutError when it takes longer: a socket's
    own time-out begins again with every byte."""
    end = time.monotonic() + patience_s
    data = bytearray()
    while part := answer.read1(65_536):
        data += part
        if len(data) > most:
            raise ValueError(f"more than {most} bytes")
        if time.monotonic() > end:
            raise TimeoutError(f"the answer took over {patience_s:g} s")
    return bytes(data)
