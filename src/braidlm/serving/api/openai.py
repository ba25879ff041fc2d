"""OpenAI's routes: models, completions and chats."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from braidlm.core.decoding.generation import encode_prompts
from braidlm.serving.api.bodies import ChatBody, CompletionBody, GenerationBody
from braidlm.serving.api.errors import ApiError
from braidlm.serving.api.generation import Choice, EventStream, Generation, Prompt, while_connected
from braidlm.serving.api.metrics import Metrics
from braidlm.serving.api.safety import Limits
from braidlm.serving.api.texts import Piece, TokenTexts, chat_logprobs, completion_logprobs, prompt_entries
from braidlm.serving.chat_template import chat_template
from braidlm.serving.engine import Engine
from braidlm.serving.models import ServedModel, ServedModels

LONG_TEXT = 10_000
"""Characters from which on a text is made into tokens beside the event loop."""
Tell = Callable[[Choice, Piece], dict[str, Any]]


class Openai:
    """The routes of one app."""

    def __init__(self, models: ServedModels, limits: Limits, metrics: Metrics):
        self.models, self.limits, self.metrics = models, limits, metrics
        self._texts: dict[str, TokenTexts] = {}
        """The texts of tokens by the fingerprints of tokenizers."""

    def router(self) -> APIRouter:
        """The routes as FastAPI takes them."""
        router = APIRouter(prefix="/v1", tags=["OpenAI"])
        router.get("/models", summary="The names of all models")(self.list_models)
        router.get("/models/{name:path}", summary="One model")(self.model)
        router.post("/completions", summary="Continue texts")(self.completions)
        router.post("/chat/completions", summary="The next message of a chat")(self.chat)
        return router

    async def list_models(self) -> dict[str, Any]:
        """The names that requests give as `model`."""
        return {"object": "list", "data": [_model_facts(model) for model in self.models.served.values()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model."""
        return _model_facts(self.models.find(name))

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Text after one prompt or several; with `stream` as server-sent events."""
        self._check_count(body, len(body.prompts))
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens: 0 tokens can only be asked for with echo", "max_tokens")
        engine = await self.models.engine(body.model)
        prompts = await _read(body, engine)
        engine = await self.models.engine(body.model)  # which may have left memory while a long text was read
        generation = Generation(body, engine, self._texts_of(engine), self.metrics, prompts)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        scores = body.echo and (body.logprobs is not None or max_tokens == 0)
        generation.submit(max_tokens, body.logprobs, scores, body.echo)
        generation.begin("cmpl", "text_completion")
        return await self._answer(request, generation, partial(_tell_completion, generation, body))

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The next message of a chat, where the model's tokenizer has a template for chats."""
        self._check_count(body, 1)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
        model = self.models.find(body.model)
        template = await asyncio.to_thread(lambda: chat_template(model.opened))
        if template is None:
            what = f"the tokenizer of '{model.name}' has no chat template: this model continues texts (/v1/completions)"
            raise ApiError(400, what, "model", "no_chat_template")
        ids = await asyncio.to_thread(template.encode, [message.plain() for message in body.messages])
        engine = await self.models.engine(body.model)
        _check_length([ids], engine, "messages")
        generation = Generation(body, engine, self._texts_of(engine), self.metrics, [Prompt(tuple(ids))])
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        generation.submit(engine.limit if asked is None else asked, top, False, False)
        generation.begin("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
        return await self._answer(request, generation, partial(_tell_chat, generation, body), _begin_chat)

    async def _answer(
        self,
        request: Request,
        generation: Generation,
        tell: Tell,
        first: Callable[[Choice], dict[str, Any] | None] = lambda choice: None,
    ) -> Response:
        seconds = self.limits.max_seconds
        if generation.body.stream:
            return EventStream(lambda send: generation.stream(first, tell, seconds, send))
        answer = await while_connected(request.receive, generation.gather(tell, seconds))
        return JSONResponse(answer) if answer is not None else Response(status_code=499)

    def _check_count(self, body: GenerationBody, prompts: int) -> None:
        """Refuse more texts in one request than may wait."""
        if prompts * body.n > self.models.waiting:
            what = f"this request asks for {prompts} x {body.n} texts, and at most {self.models.waiting} may wait"
            raise ApiError(400, what, "n" if body.n > 1 else "prompt")

    def _texts_of(self, engine: Engine) -> TokenTexts:
        return self._texts.setdefault(engine.tokenizer.fingerprint, TokenTexts(engine.tokenizer))


def _tell_completion(generation: Generation, body: CompletionBody, choice: Choice, piece: Piece) -> dict[str, Any]:
    text, entries, logprobs = piece.text, piece.entries, None
    echoes = body.echo and not choice.has_begun
    if echoes:
        text = choice.prompt.text + text
    if body.logprobs is not None:
        if echoes and choice.completion.prompt is not None:
            entries = [*prompt_entries(choice.completion.prompt, generation.engine.tokenizer), *entries]
        logprobs = completion_logprobs(entries, generation.texts, body.logprobs)
    told = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason}
    return told | generation.listed_ids(choice, piece)


def _begin_chat(choice: Choice) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tell_chat(generation: Generation, body: ChatBody, choice: Choice, piece: Piece) -> dict[str, Any]:
    logprobs = chat_logprobs(piece.entries, generation.texts) if body.logprobs else None
    message: dict[str, Any] = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
    if body.stream:
        message = {"delta": {"content": piece.text} if piece.text else {}}
    told = {"index": choice.index, **message, "logprobs": logprobs, "finish_reason": choice.reason}
    return told | generation.listed_ids(choice, piece)


async def _read(body: CompletionBody, engine: Engine) -> list[Prompt]:
    """The prompts as tokens, and as text where they are echoed."""
    tokenizer = engine.tokenizer
    texts: Any = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if not texts:
        given: Any = body.prompts
        vocabulary = engine.opened.vocab_size
        if any(max(ids) >= vocabulary for ids in given):
            raise ApiError(400, f"prompt: token ids are below {vocabulary}", "prompt")
        _check_length(given, engine, "prompt", body.max_tokens == 0)
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) if body.echo else "" for ids in given]
        return [Prompt(tuple(ids), text) for ids, text in zip(given, texts, strict=True)]
    beside = sum(map(len, texts)) >= LONG_TEXT
    encoded = await asyncio.to_thread(encode_prompts, tokenizer, texts) if beside else encode_prompts(tokenizer, texts)
    _check_length(encoded, engine, "prompt", body.max_tokens == 0)
    return [Prompt(tuple(ids), text) for ids, text in zip(encoded, texts, strict=True)]


def _check_length(prompts: list[list[int]], engine: Engine, param: str, scored_only: bool = False) -> None:
    """Refuse prompts that leave no room; the engine would too, without OpenAI's code for it."""
    if (longest := max(map(len, prompts))) >= engine.limit + scored_only:
        what = f"the prompt has {longest} tokens, and the model's limit is {engine.limit}"
        raise ApiError(400, f"{what}. Shorten the prompt.", param, "context_length_exceeded")


def _model_facts(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": int(model.source.stat().st_mtime), "owned_by": "braid"}
