"""The sidecar's HTTP application: control under /v1/blasst, health, metrics and the status page."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from starlette.routing import Route

from blasst.kernels.exchange.desired import DesiredState, DesiredStateError
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.kernels.exchange.schedule import Threshold
from blasst.server import change, models, observe, openapi, presets, problems
from blasst.server.auth import Gate
from blasst.server.canary import Canary
from blasst.server.control import ControlService, Wish, etag, unreadable
from blasst.server.headers import SecurityHeaders
from blasst.server.limits import Limits
from blasst.server.metrics import MetricsPage
from blasst.server.problems import Problem
from blasst.server.settings import Settings, probe_writable
from blasst.server.tokens import Tokens
from blasst.server.traces import TracedCalls, Traces
from blasst.server.upstream import Upstream

BODY_TIMEOUT_S = 10.0
"""Bodies are small; one that never ends must not hold its connection for ever."""

_AUDIT_RECORDS = 200
_STATIC = Path(__file__).parent / "static"
_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN_PATHS = (*_PAGE_FILES, "/healthz", "/readyz", "/metrics", "/openapi.json")
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag of the state you saw, or * for whatever is there. Missing: 428.",
        examples=['"3"'],
    ),
]


@dataclass(frozen=True)
class Parts:
    """What a sidecar may have besides. follow_error: what is wrong with the followed file."""

    follow_error: Callable[[], str] = lambda: ""
    canary: Canary | None = None
    upstream: Upstream | None = None
    traces: Traces | None = None


def create_app(
    settings: Settings,
    control: ControlService,
    collector: PagesCollector,
    limits: Limits | None = None,
    parts: Parts | None = None,
) -> FastAPI:
    """control: open, of the same state folder. collector: over its stats folder. limits: how often
    callers may call; None: the usual ones. Raises SettingsError for an unusable token file."""
    parts = parts or Parts()
    app = FastAPI(
        title="blasst sidecar",
        version=importlib.metadata.version("blasst"),
        description=openapi.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        # A redirect to the path without its slash would be built from the Host header.
        redirect_slashes=False,
    )
    tally = control.tally
    problems.install(app, tally)
    tokens = None
    if settings.token_file is not None:
        tokens = Tokens(
            settings.token_file,
            settings.read_token_file,
            lambda message: tally.error("token-file", message),
        )
    _add_control(app, settings, control, collector)
    _add_evidence(app, settings, control, collector, parts.canary)
    _add_health(app, settings, control)
    checks = {"blasst_control_state_ok": lambda: not control.error()}
    if tokens is not None:
        checks["blasst_token_files_ok"] = lambda: not tokens.errors()
    if settings.follow is not None:
        checks["blasst_followed_file_ok"] = lambda: not parts.follow_error()
    if parts.upstream is not None:
        checks["blasst_upstream_up"] = lambda: parts.upstream is not None and parts.upstream.up
    page = MetricsPage(collector, checks, tally=tally, canary=parts.canary)
    _add_metrics(app, page, parts.upstream)
    _add_page(app)
    openapi.complete(app, protected=tokens is not None)
    app.add_middleware(
        Gate, tokens=tokens, open_paths=OPEN_PATHS, limits=limits or Limits(), tally=tally
    )
    app.add_middleware(SecurityHeaders)
    if parts.traces is not None:
        app.add_middleware(TracedCalls, traces=parts.traces, routes=_paths(app))
    return app


def _paths(app: FastAPI) -> list[str]:
    return [route.path for route in app.routes if isinstance(route, Route)]


async def _change(
    request: Request,
) -> tuple[change.ThresholdChange, Threshold | None]:
    try:
        body = await asyncio.wait_for(request.body(), BODY_TIMEOUT_S)
    except TimeoutError:
        raise Problem(408, "too-slow", f"The body took over {BODY_TIMEOUT_S:g} s.") from None
    return change.parse_change(body, request.headers.get("content-type", ""))


def _add_control(
    app: FastAPI, settings: Settings, control: ControlService, collector: PagesCollector
) -> None:
    path = "/v1/blasst/threshold"
    cache = collector.cache

    def answer(state: DesiredState, response: Response) -> models.ThresholdState:
        response.headers["ETag"] = etag(state)
        shown = observe.threshold_state(state, cache)
        if observe.pending(shown):
            response.status_code = 202
        return shown

    @app.get(path, tags=["control"], summary="The threshold and who has taken it over")
    def get_threshold(response: Response) -> models.ThresholdState:
        """What new requests get, as written; `front_ends` says who has read it."""
        try:
            state = control.read()
        except DesiredStateError as e:
            raise unreadable(e) from e
        response.headers["ETag"] = etag(state)
        return observe.threshold_state(state, cache)

    @app.put(path, tags=["control"], summary="Set the threshold", openapi_extra=openapi.PUT_BODY)
    def put_threshold(
        request: Request,
        response: Response,
        wanted: Annotated[tuple[change.ThresholdChange, Threshold | None], Depends(_change)],
        if_match: IfMatch = None,
    ) -> models.ThresholdState:
        """Replaces the whole state. The value already in force is no change: same generation.

        202: written, and a live front end has yet to read it; GET shows `converged`.
        """
        body, threshold = wanted
        origin = ""
        if "target_skip_rate" in body.model_fields_set:
            found = presets.find(settings.presets_folder, presets.Running.of(cache.pages()))
            threshold, origin = presets.threshold(found, body.target_skip_rate, body.preset or "")
        wish = Wish(threshold, body.min_context, body.reason, _caller(request), origin)
        return answer(_traced(request, control.set(wish, if_match)), response)

    @app.delete(path, tags=["control"], summary="Back to dense attention")
    def delete_threshold(
        request: Request, response: Response, if_match: IfMatch = None
    ) -> models.ThresholdState:
        """The same as PUT {"off": true}."""
        state = control.set(Wish(None, by=_caller(request)), if_match)
        return answer(_traced(request, state), response)


def _add_evidence(
    app: FastAPI,
    settings: Settings,
    control: ControlService,
    collector: PagesCollector,
    canary: Canary | None,
) -> None:
    cache = collector.cache

    @app.get("/v1/blasst/status", tags=["evidence"], summary="Counters, classes, convergence")
    def get_status() -> models.Status:
        """All that the status page shows. Never an error for a bad state file: `error` says it."""
        return observe.status(control, cache, canary)

    @app.get("/v1/blasst/presets", tags=["evidence"], summary="Presets, and which of them fit")
    def get_presets() -> models.PresetList:
        """A preset turns a target skip rate into a scale, for one model, kernel and tile size."""
        found = presets.find(settings.presets_folder, presets.Running.of(cache.pages()))
        return models.PresetList(presets=[observe.preset_view(f) for f in found])

    @app.get("/v1/blasst/audit", tags=["evidence"], summary="Who changed the threshold, and when")
    def get_audit() -> models.AuditList:
        """The newest 200 changes, newest last; the file audit.jsonl has all."""
        records = []
        try:
            newest = control.audit.tail(_AUDIT_RECORDS)
        except OSError as e:
            raise Problem(503, "audit-unreadable", f"The audit log: {e.strerror}.") from e
        for record in newest:
            # A line that somebody edited is not shown as if we had written it.
            with contextlib.suppress(ValidationError):
                records.append(models.AuditRecord.model_validate(record))
        return models.AuditList(records=records)


def _add_health(app: FastAPI, settings: Settings, control: ControlService) -> None:
    @app.get("/healthz", tags=["health"], summary="The process answers")
    def healthz() -> models.Health:
        """For a liveness probe; it looks at nothing."""
        return models.Health()

    @app.get("/readyz", tags=["health"], summary="The state folder and file are usable")
    def readyz() -> models.Health:
        """For a readiness probe; it writes and removes a small file."""
        try:
            control.read()
            probe_writable(settings.state_dir)
        except DesiredStateError as e:
            raise unreadable(e) from e
        except OSError as e:
            raise Problem(
                503, "state-unwritable", f"The state folder cannot be written: {e.strerror}."
            ) from e
        return models.Health()

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz)):
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _add_metrics(app: FastAPI, page: MetricsPage, upstream: Upstream | None) -> None:
    @app.get(
        "/metrics",
        tags=["evidence"],
        summary="Prometheus text; reads files, never asks the engine",
        response_class=PlainTextResponse,
    )
    def metrics() -> Response:
        """Made at most ten times a second. docs/api.md lists every name, label and unit."""
        # vLLM's part first: whether it answered is on our own.
        foreign = b"" if upstream is None else upstream.text()
        return Response(page.text() + foreign, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_page(app: FastAPI) -> None:
    for path, (name, media_type) in _PAGE_FILES.items():
        endpoint = _file_endpoint(name, media_type)
        app.add_api_route(path, endpoint, include_in_schema=False, response_class=FileResponse)


def _file_endpoint(name: str, media_type: str) -> Callable[[], FileResponse]:
    def serve_file() -> FileResponse:
        return FileResponse(_STATIC / name, media_type=media_type)

    return serve_file


def _traced(request: Request, state: DesiredState) -> DesiredState:
    """The state again; a span of this call, if there is one, says what is in force after it."""
    noted = getattr(request.state, "trace", None)
    if noted is not None:
        noted |= {
            "blasst.generation": state.generation,
            "blasst.threshold": str(state.threshold or "dense"),
        }
    return state


def _caller(request: Request) -> str:
    address = request.client.host if request.client else "local"
    role = getattr(request.state, "role", None)
    return f"{address} ({role} token)" if role else address
