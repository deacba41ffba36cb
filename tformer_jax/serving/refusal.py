"""The one shape in which the server says no: an HTTP status and one sentence."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from tformer_jax.config import ConfigError

TYPES = {429: "rate_limit_error", 404: "not_found_error"}
"""OpenAI's type of an error by status; other statuses are `invalid_request_error` below 500, else `server_error`."""


class Refusal(ConfigError):
    """A request that is not answered: why, in one sentence, and with which HTTP status.

    Args:
        message: the sentence.
        status: the HTTP status.
        param: the field of the request that is wrong.
        code: one word for programs.
        headers: further headers of the response.
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
        """OpenAI's shape of an error."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The refusal as an HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)
