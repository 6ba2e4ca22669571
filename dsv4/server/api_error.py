"""Errors in the shapes that clients expect: OpenAI's and Anthropic's error objects."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from dsv4.chat.fields import show
from dsv4.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 500: "api_error"}
_PATH = re.compile(r"([A-Za-z_][\w.\[\]-]*): ")


class ApiError(HTTPException):
    """An error response. `param`: the field at fault; `code`: a machine-readable word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,  # of the Anthropic protocol
    ) -> None:
        headers = {}
        if retry_after is not None:
            headers["retry-after"] = str(retry_after)
        if status in (400, 404, 413, 500):
            headers["x-should-retry"] = "false"
        super().__init__(status, message, headers)
        self.message = message
        self.param = param
        self.code = code
        self.details = details

    def body(self, path: str) -> dict[str, Any]:
        if "/messages" in path:
            kind = _ANTHROPIC_TYPES.get(self.status_code, "invalid_request_error")
            details = self.details or ({"error_code": self.code} if self.code else None)
            more = {} if details is None else {"details": details}
            return {"type": "error", "error": {"type": kind, "message": self.message, **more}}
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status_code, self.headers)


def bad_request(error: RequestError) -> ApiError:
    """Our messages start with the path of the field at fault, if there is one."""
    found = _PATH.match(str(error))
    return ApiError(400, str(error), param=found.group(1) if found else None)


def bad_fields(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The validation error with the deepest path: in a union, the branch the client meant."""
    error = max(errors, key=lambda item: len(item["loc"]))
    path = ""
    for part in error["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "bool"):  # branches of a union
            path += f".{part}" if path else part
    name = path or "body"
    if error["type"] == "missing":
        return ApiError(400, f"{name}: found nothing, expected a value", param=name)
    words = str(error["msg"]).replace("Input should", "it should", 1)
    message = f"{name}: found {show(error.get('input'))}; {words[:1].lower()}{words[1:]}"
    return ApiError(400, message, param=name)


def internal_error(request_id: str, code: str | None = None, text: str | None = None) -> ApiError:
    """Of the engine's errors only those with a name are told to the client."""
    if code is not None:
        return ApiError(500, str(text), code=code)
    message = f"the server failed; its log tells more under the request id {request_id}"
    return ApiError(500, message, code="internal_error")
