"""How bodies are read: strictly, once, for every route."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from dsv4.server.api_error import ApiError


class JsonRequest(Request):
    """Bodies read strictly: no NaN, no deep nesting, no half characters."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = from_json(await self.body(), allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"body: not JSON ({error})", code="invalid_json") from error
        return self._json


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return read_strictly


def make_router() -> APIRouter:
    return APIRouter(route_class=JsonRoute)
