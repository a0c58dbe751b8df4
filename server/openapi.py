"""Completes the OpenAPI 3.1 document that FastAPI derives: errors, the PUT body, the token."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from blasst.server import problems
from blasst.server.change import ThresholdChange
from blasst.server.examples import EXAMPLES, METRICS

DESCRIPTION = """Sets the skip threshold of a vLLM deployment while it serves, and shows the effect.

Units: **MAG** m is lambda = 2^(-m/1000), a higher MAG skips less; **lambda** is in natural base,
0 <= lambda < 1; **scale** is lambda times the prompt's length in tokens; `off` is dense attention.
A change rules requests admitted after it; the lambda of a request never changes.
Errors are `application/problem+json` (RFC 9457)."""

_REF = "#/components/schemas/"
PUT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": _REF + "ThresholdChange"}}},
    }
}
_ETAG = {
    "ETag": {
        "description": "The generation, quoted; send it back in If-Match.",
        "schema": {"type": "string", "examples": ['"3"']},
    }
}
_WRITE = {
    400: "The body is not JSON.",
    408: "The body did not arrive in 10 seconds.",
    404: "There is no preset of this name.",
    409: "No layer of the running engine can skip, or no one preset fits what runs.",
    412: "If-Match names another generation: somebody changed it first.",
    413: "The body is larger than 16 KiB.",
    415: "The body is not sent as application/json.",
    422: "A value outside its range, an unknown field, or not exactly one unit.",
    428: "If-Match is missing.",
    503: "The state folder cannot be written, or its file is corrupt (If-Match: * repairs it).",
    507: "The state folder's disk is full; the old threshold stays in force.",
}
_ERRORS: dict[tuple[str, str], dict[int, str]] = {
    ("/v1/blasst/threshold", "get"): {503: "The desired-state file is corrupt or lost."},
    ("/v1/blasst/threshold", "put"): _WRITE,
    ("/v1/blasst/threshold", "delete"): {s: _WRITE[s] for s in (412, 413, 428, 503, 507)},
    ("/v1/blasst/audit", "get"): {503: "The audit log cannot be read."},
    ("/readyz", "get"): {503: "The state folder or its file is unusable."},
}


def complete(app: FastAPI, *, protected: bool) -> None:
    """Make `app.openapi()` answer the whole document. protected: a token is configured."""
    derive = app.openapi

    def whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = derive()
            _add_schemas(document)
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _add_errors(operation, path, method, protected)
            if protected:
                document["components"]["securitySchemes"] = {
                    "token": {"type": "http", "scheme": "bearer"}
                }
        return app.openapi_schema or {}

    app.openapi = whole  # type: ignore[method-assign]


def _add_schemas(document: dict[str, Any]) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = problems.schema()
    change = ThresholdChange.model_json_schema(ref_template=_REF + "{model}")
    schemas |= change.pop("$defs") | {"ThresholdChange": change}
    # Here and not with the models: FastAPI drops the nulls of examples.
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example]
    for derived in ("HTTPValidationError", "ValidationError"):
        schemas.pop(derived, None)


def _add_errors(operation: dict[str, Any], path: str, method: str, protected: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    guarded = path.startswith("/v1/")
    errors = dict(_ERRORS.get((path, method), {}))
    if guarded and protected:
        operation["security"] = [{"token": []}]
        errors[401] = "The bearer token is missing or wrong."
        if method not in ("get", "head"):
            errors[403] = "The token may only read."
    elif not protected:
        errors[403] = "Without a token only loopback names are served (Host header)."
    errors[500] = "Unexpected error; the sidecar's log has it."
    errors[429] = "Too many calls; Retry-After says when to try again."
    for status, text in sorted(errors.items()):
        responses[str(status)] = {
            "description": text,
            "content": {problems.MEDIA_TYPE: {"schema": {"$ref": _REF + "Problem"}}},
        }
    if path == "/v1/blasst/threshold":
        responses["200"]["headers"] = _ETAG
        if method != "get":
            text = "Written; a live front end has yet to read it. GET shows `converged`."
            responses["202"] = {**responses["200"], "description": text}
    if path == "/metrics":
        responses["200"]["content"]["text/plain"]["example"] = METRICS
    for parameter in operation.get("parameters", ()):
        if parameter["name"] == "If-Match":
            parameter["required"] = True
            parameter["schema"] = {"type": "string", "examples": ['"3"', "*"]}
