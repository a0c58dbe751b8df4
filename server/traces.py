"""OpenTelemetry spans of the API's calls and of the canary, where they were asked for.

The SDK is an extra and is loaded only then. Spans leave in a thread of the SDK's own; a collector
that is gone costs no request anything.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from blasst.server.settings import SettingsError, check_url

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Value = str | int | float | bool
_OTHER = "other"


class Traces:
    """Makes spans and sends them to one collector."""

    def __init__(self, provider: Any) -> None:
        """provider: a TracerProvider of the SDK."""
        self._provider = provider
        self._tracer = provider.get_tracer("blasst", importlib.metadata.version("blasst"))

    @classmethod
    def to(cls, endpoint: str) -> Traces:
        """endpoint: base address of an OTLP/HTTP collector, such as http://127.0.0.1:4318. Raises
        SettingsError when the SDK is not installed."""
        base = check_url(endpoint, "--otlp-endpoint")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as e:
            raise SettingsError(
                f"--otlp-endpoint needs {e.name}: pip install 'blasst[traces]'"
            ) from None
        resource = Resource.create(
            {
                "service.name": "blasst-sidecar",
                "service.version": importlib.metadata.version("blasst"),
            }
        )
        provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(f"{base}/v1/traces", timeout=5)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    @contextlib.contextmanager
    def span(
        self, name: str, headers: Mapping[str, str] | None = None, kind: str = "internal"
    ) -> Iterator[dict[str, Value]]:
        """Attributes that are put into what it gives become the span's. headers: of a caller, for
        its `traceparent`. kind: internal, server or client."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers or {})
        attributes: dict[str, Value] = {}
        with self._tracer.start_as_current_span(
            name, parent, SpanKind[kind.upper()], record_exception=False
        ) as span:
            try:
                yield attributes
            finally:
                span.set_attributes(attributes)

    def stop(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class TracedCalls:
    """ASGI middleware: one span a call, with what the call put into `trace` (a dict) of its state.
    A path that is no route shows as other: callers choose paths."""

    def __init__(self, app: ASGIApp, *, traces: Traces, routes: Collection[str]) -> None:
        self.app = app
        self.traces = traces
        self.routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self.routes else _OTHER
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        noted: dict[str, Value] = {}
        scope.setdefault("state", {})["trace"] = noted
        with self.traces.span(f"{method} {route}", headers, "server") as attributes:
            attributes |= {"http.request.method": method, "http.route": route}

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    attributes["http.response.status_code"] = message["status"]
                await send(message)

            try:
                await self.app(scope, receive, watched)
            finally:
                attributes |= noted


_METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST", "PATCH", "OPTIONS")
