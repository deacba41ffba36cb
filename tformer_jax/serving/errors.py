"""The format of all error responses: an HTTP status and one sentence."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from tformer_jax.base.errors import UserError

TYPES = {429: "rate_limit_error", 404: "not_found_error"}
"""OpenAI's type of an error by status; other statuses are `invalid_request_error` below 500, else `server_error`."""


class RequestError(UserError):
    """A request that is rejected, with the reason in one sentence and an HTTP status.

    Args:
        message: reason, in one sentence.
        status: HTTP status.
        param: invalid field of the request.
        code: error code for programs.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Returns the error as an HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)
