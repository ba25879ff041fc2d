"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, whatever went wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from braidlm.core.errors import BraidError
from braidlm.serving.engine import Busy
from braidlm.serving.models import NotFound, UnknownModel

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's kinds of errors by status; others below 500 are an `invalid_request_error`."""
SERVER_ERROR = "the server made a mistake, which its terminal shows"
LONGEST_MESSAGE = 2_000
"""Characters of a message; what a client sent may be longer than that."""


class ApiError(HTTPException):
    """A request that is refused, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """What OpenAI's clients read."""
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        message = self.message[:LONGEST_MESSAGE]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def as_api_error(error: BraidError | ApiError) -> ApiError:
    """An error with the status that it has over HTTP."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"})
    if isinstance(error, UnknownModel):
        return ApiError(404, str(error), "model", "model_not_found")
    if isinstance(error, NotFound):
        return ApiError(404, str(error), code="not_found")
    return ApiError(400, str(error))


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of an app have OpenAI's shape."""

    @app.exception_handler(ApiError)
    @app.exception_handler(BraidError)
    async def refused(request: Request, error: ApiError | BraidError) -> JSONResponse:
        return as_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        if "json" not in request.headers.get("content-type", "json"):
            return ApiError(415, "send a JSON body with Content-Type: application/json").response()
        return validation_error(error.errors()).response()

    @app.exception_handler(AnyHTTPException)
    async def of_http(request: Request, error: AnyHTTPException) -> JSONResponse:
        told = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not allowed here"}
        status = error.status_code
        return ApiError(status, told.get(status, str(error.detail)), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def of_the_server(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, SERVER_ERROR).response()


def validation_error(problems: Sequence[Any]) -> ApiError:
    """The first problem of a body that does not have the types that it should have."""
    first = problems[0]
    where = [str(part) for part in first["loc"][1:]]  # it begins with body, query or path
    param = where[0] if where else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "missing" and param is None:
        return ApiError(400, "there is no body; give a JSON object")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown or unsupported key '{'.'.join(where)}'", param)
    if 0 in (first.get("ctx", {}).get(most) for most in ("le", "max_length")):
        return ApiError(400, f"{param}: there is no such thing here; leave it out", param, "unsupported_parameter")
    same = [p for p in problems if param is not None and param in map(str, p["loc"])]
    expected = "; or ".join(dict.fromkeys(str(problem["msg"]) for problem in same[:8])) or first["msg"]
    return ApiError(400, f"{'.'.join(where[:1]) or 'the body'}: {expected}", param)
