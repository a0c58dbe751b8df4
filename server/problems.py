"""Errors as application/problem+json (RFC 9457): stable `type`, a remedy, no traces, no secrets."""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from blasst.server.tally import Tally

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:blasst:problem:"

log = logging.getLogger("blasst.server")


class Problem(Exception):
    """What a handler raises to answer with an error. `kind`: the stable last part of `type`."""

    def __init__(
        self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        body = {
            "type": TYPE_PREFIX + self.kind,
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        return JSONResponse(body, self.status, self.headers, MEDIA_TYPE)


def install(app: FastAPI, tally: Tally) -> None:
    """Answer every error of the application in this form, and count it."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> JSONResponse:
        tally.error(error.kind, error.detail)
        return error.response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http")
        detail = {
            404: "There is nothing at this path; /openapi.json lists what there is.",
            405: "This path does not take this method; the Allow header names those it takes.",
        }.get(error.status_code, str(error.detail))
        tally.error(kind, detail)
        headers = _allow(app, request) if error.status_code == 405 else error.headers
        return Problem(error.status_code, kind, detail, headers).response()

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("unexpected error in %s %s", request.method, request.scope["path"])
        tally.error("internal", f"Unexpected error in {request.method} of {type(error).__name__}.")
        return Problem(500, "internal", "Unexpected error; the sidecar's log has it.").response()


def _allow(app: FastAPI, request: Request) -> dict[str, str]:
    """All methods of the path: each has a route of its own, and routing names the first alone."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
            methods |= route.methods or set()
    return {"Allow": ", ".join(sorted(methods))}


def schema() -> dict[str, Any]:
    """The JSON schema of every error body."""
    text = {"type": "string"}
    return {
        "type": "object",
        "title": "Problem",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {**text, "description": "Stable identifier, " + TYPE_PREFIX + "..."},
            "title": {**text, "description": "The status in words."},
            "status": {
                "type": "integer",
                "minimum": 400,
                "maximum": 599,
                "description": "The HTTP status.",
            },
            "detail": {**text, "description": "What is wrong and what to do about it."},
        },
        "example": {
            "type": TYPE_PREFIX + "bad-threshold",
            "title": "Unprocessable Entity",
            "status": 422,
            "detail": "lambda 1.5 is outside 0 <= lambda < 1 (natural base; ...)",
        },
    }
