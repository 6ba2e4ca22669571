"""GET /v1/models and /tokenizer_info; POST /tokenize and /detokenize."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from dsv4.chat.requests import read_chat_completions
from dsv4.server.api_error import ApiError
from dsv4.server.generation import refuse_images
from dsv4.server.json_route import make_router
from dsv4.server.schemas import DetokenizeBody, TokenizeBody
from dsv4.server.service import Service, in_thread, token_text
from dsv4.server.sse import whole_answer

router = make_router()


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "dsv4",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_context,
        "dialect": service.dialect.name,
    }


def _anthropic_model(service: Service, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(service.created, UTC)
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": service.max_context,
    }


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The served names; Anthropic clients get their protocol's shape."""
    service: Service = request.app.state.service
    service.link.check_loaded()
    if "anthropic-version" not in request.headers:
        return {"object": "list", "data": [_model(service, name) for name in service.names]}
    data = [_anthropic_model(service, name) for name in service.names]
    ends = {"first_id": service.names[0], "last_id": service.names[-1]}
    return {"data": data, "has_more": False, **ends}


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    service: Service = request.app.state.service
    service.link.check_loaded()
    shape = _anthropic_model if "anthropic-version" in request.headers else _model
    return shape(service, service.model_name(name))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Tokenizer facts for evaluation tools; the prompt format has no template."""
    service: Service = request.app.state.service
    service.link.check_loaded()
    tokenizer = service.tokenizer
    special = tokenizer.special
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.token_bytes(special.bos).decode(),
        "eos_token": tokenizer.token_bytes(special.eos).decode(),
        "pad_token": tokenizer.token_bytes(special.eos).decode(),
        "unk_token": None,
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": service.max_context,
        "vocab_size": int(service.link.facts["vocab_size"]),
        "chat_template": None,
        "dialect": service.dialect.name,
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The ids of a raw text or of a conversation, as sent to the model."""
    service: Service = request.app.state.service
    service.link.check_loaded()
    service.model_name(body.model)
    fields = await request.json()
    tokenizer = service.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            conversation = refuse_images(read_chat_completions(fields, service.dialect))
            return service.prompt_ids(conversation.encode(service.dialect))
        service.check_length(len(body.prompt or ""), "prompt")
        ids = tokenizer.encode_with_specials(body.prompt or "")
        is_bare = body.add_special_tokens is False or ids[:1] == [tokenizer.special.bos]
        return ids if is_bare else [tokenizer.special.bos, *ids]

    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: found both or neither, expected a prompt or messages")
    ids = await in_thread(encode)

    def build() -> dict[str, Any]:
        answer = {"tokens": ids, "count": len(ids), "max_model_len": service.max_context}
        if body.return_token_strs:
            answer["token_strs"] = [token_text(tokenizer.token_bytes(token)) for token in ids]
        return answer

    return await whole_answer(build, len(ids))


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    service: Service = request.app.state.service
    service.model_name(body.model)

    def decode() -> str:
        service.check_ids(body.tokens, "tokens", last=2**31 - 1)  # unknown ids decode to U+FFFD
        return service.tokenizer.decode(body.tokens)

    text = await in_thread(decode)
    return await whole_answer(lambda: {"prompt": text}, len(body.tokens))
