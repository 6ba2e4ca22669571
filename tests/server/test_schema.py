"""The OpenAPI document fuzzed with schemathesis: no 5xx, no hang, errors of the right shape.

`make fuzz-server` runs the same for longer.
"""

import os
import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.server.support import Server

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    with server.client() as client:
        return client.get("/openapi.json").json()


PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/tokenizer_info",
    "/health",
    "/ready",
    "/ping",
    "/load",
    "/metrics",
    "/stats",
    "/version",
)


@pytest.mark.parametrize("path", PATHS)
def test_no_request_breaks_the_server(path: str, document: Any, server: Server) -> None:
    [(method, _)] = document["paths"][path].items()
    operation = schemathesis.openapi.from_dict(document)[path][method]
    required = required_fields(document, path)
    seen: set[int] = set()
    with server.client() as client:

        @given(case=strategy(operation))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=EXAMPLES < 100,  # `make test` asks the same questions every time
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        def ask(case: Any) -> None:
            seen.add(check(case, client))
            if required and isinstance(case.body, dict):
                # alone, what must be there often passes; among random options it hardly does
                case.body = {name: case.body[name] for name in required if name in case.body}
                seen.add(check(case, client))

        ask()
    if required:
        assert {200, 400} <= seen  # both kinds of questions were asked
    assert server.chat("SAY </think>alive").status_code == 200


def required_fields(document: Any, path: str) -> list[str]:
    [operation] = document["paths"][path].values()
    if "requestBody" not in operation:
        return []
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    return list(document["components"]["schemas"][name].get("required", []))


def strategy(operation: Any) -> Any:
    """What the document allows; where there is a body, also what it does not."""
    good = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body:
        return good
    return good | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def check(case: Any, client: httpx.Client) -> int:
    try:
        answer = send(case, client)
    except (httpx.LocalProtocolError, httpx.InvalidURL):
        return 0  # a header or address that this client cannot send
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 422
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert "/messages" in case.path or error.keys() == ERROR_KEYS
        assert not re.search(r"Traceback|\.py\b", answer.text)
    return answer.status_code


def send(case: Any, client: httpx.Client) -> httpx.Response:
    arguments = case.as_transport_kwargs(base_url=str(client.base_url))
    known = {name: arguments.get(name) for name in ("method", "url", "headers", "params", "json")}
    if "data" in arguments and arguments.get("json") is None:
        data = arguments["data"]
        known["content"] = data if isinstance(data, bytes | str) else str(data)
    return client.request(**known)


def test_every_route_is_in_the_document(document: Any) -> None:
    paths = set(document["paths"])
    assert paths == set(PATHS)
    body = document["components"]["schemas"]["ChatBody"]
    assert body["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
