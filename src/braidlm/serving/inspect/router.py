"""`/braid/...`: what looks inside models, runs and reports, over HTTP."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from braidlm.core.console import plain_data
from braidlm.core.decoding.generation import encode_prompts, next_after, token_texts
from braidlm.core.errors import BraidError
from braidlm.inspection.layers import routing_modules, short_labels
from braidlm.inspection.lineage import lineage_graph
from braidlm.inspection.one_text import check_size, gate_name, predict, text_change, token_routings
from braidlm.model.paths.switches import module_routers, path_names
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import gates_of
from braidlm.opening.opened_model import OpenedModel
from braidlm.serving.api.errors import ApiError
from braidlm.serving.api.safety import REPORT_POLICY
from braidlm.serving.chat_template import chat_template
from braidlm.serving.engine import Busy, Switches
from braidlm.serving.inspect import answers
from braidlm.serving.inspect.folders import ServedFolders
from braidlm.serving.models import ServedModel, ServedModels
from braidlm.serving.switches import PartSwitches
from braidlm.studies.show import folder_facts

MAX_WAITING = 64
"""Requests about texts that may be at work or wait at once."""


def router(models: ServedModels, folders: ServedFolders) -> APIRouter:
    """All endpoints; what computes does so on the engine's thread of its model, between two steps of generation."""
    api = APIRouter()
    _model_routes(api, models, folders)
    _text_routes(api, models)
    _run_routes(api, models, folders)
    return api


def _model_routes(api: APIRouter, models: ServedModels, folders: ServedFolders) -> None:
    parts: dict[Path, dict[str, Any]] = {}
    facts: dict[Path, Any] = {}
    """Parts and facts are kept by a model's folder: finding them builds its modules or reads its weights."""

    def found(model: ServedModel) -> answers.ModelAnswer:
        told: dict[str, Any] = {"name": model.name, "loaded": model.engine is not None}
        told["run"] = folders.run_id(model.run)
        try:
            opened = model.opened
            if opened.folder not in parts:
                parts[opened.folder] = _parts(opened)
            return answers.ModelAnswer(**told, **parts[opened.folder])
        except BraidError as error:  # a run before its first checkpoint, a folder that was removed
            return answers.ModelAnswer(**told, problem=str(error))

    @api.get("/braid/models", tags=["models"])
    def served_models() -> answers.ModelsAnswer:
        """All models that are served, with the names of their parts that can be switched off."""
        return answers.ModelsAnswer(models=[found(model) for model in models.served.values()])

    @api.get("/braid/models/{name:path}/facts", tags=["models"])
    def model_facts(name: str) -> dict[str, Any]:
        """What `braid show MODEL --json` says: sizes, costs, stages, problems."""
        opened = models.find(name).opened
        if opened.folder not in facts:
            facts[opened.folder] = json.loads(json.dumps(plain_data(folder_facts(opened)), default=str))
        return facts[opened.folder]

    @api.get("/braid/models/{name:path}/lineage", tags=["models"])
    def lineage(name: str) -> answers.LineageAnswer:
        """What came from where: models, recipes, edits and data, as far as lineage.json and the folders tell."""
        model = models.find(name)
        graph = lineage_graph(model.opened.title, model.opened.lineage, folders.lineage_of)
        return answers.LineageAnswer.model_validate(graph, from_attributes=True)


def _text_routes(api: APIRouter, models: ServedModels) -> None:
    one_comparison = asyncio.Semaphore(1)
    """Two predictions of a whole text may take half a gigabyte."""
    asked = 0
    """How many requests are about a text just now."""

    @contextmanager
    def place() -> Iterator[None]:
        """One of so many requests that may wait for a model."""
        nonlocal asked
        if asked >= MAX_WAITING:
            raise Busy(f"{asked} requests look into models already, as many as may", todo="Try again later.")
        asked += 1
        try:
            yield
        finally:
            asked -= 1

    @api.post("/braid/tokens", tags=["tokens"])
    def tokens(body: answers.TokensBody) -> answers.TokensAnswer:
        """A text as the model's tokens, with those that begin a text."""
        found = models.find(body.model)
        ids = _read(found, body.text, "text")
        return answers.TokensAnswer.model_validate({"tokens": _tokens(found.opened.tokenizer, ids)})

    @api.post("/braid/next", tags=["tokens"])
    async def next_token(body: answers.NextBody) -> answers.NextAnswer:
        """The most probable tokens after a prompt, as `braid generate --top-next` gives them."""
        found, switches = models.find(body.model), body.switches.switches()
        with place():
            ids = await asyncio.to_thread(_read, found, body.prompt, "prompt", body.tokens)
            tokenizer, engine = found.opened.tokenizer, await models.engine(body.model)
            best = await engine.call(lambda model: next_after(model, tokenizer, ids, body.top), switches)
        return answers.NextAnswer.model_validate({"tokens": best}, from_attributes=True)

    @api.post("/braid/routings", tags=["tokens"], response_model=answers.RoutingsAnswer)
    async def routings(body: answers.RoutingsBody) -> Response:
        """Who goes where: for each token and layer, the paths, experts, members or depths that serve it, and what gates
        add. The choices are those of `braid routes`."""
        found, switches = models.find(body.model), body.switches.switches()
        with place():
            ids = await asyncio.to_thread(_read, found, body.text, "text")
            engine = await models.engine(body.model)
            layers = await engine.call(lambda model: token_routings(model, ids), switches)

            def answer() -> answers.RoutingsAnswer:
                told = {"tokens": _tokens(found.opened.tokenizer, ids), "layers": layers}
                return answers.RoutingsAnswer.model_validate(told, from_attributes=True)

            return await _written(answer)

    @api.post("/braid/changes", tags=["tokens"], response_model=answers.ChangesAnswer)
    async def changes(body: answers.ChangesBody) -> Response:
        """How the prediction of a text changes with parts switched off, or from one model to another."""
        one, other = models.find(body.model), models.find(body.other or body.model)
        with place():
            ids = await asyncio.to_thread(_read_for_both, one, other, body.text)
            async with one_comparison:
                sides = [(one, body.against.switches()), (other, body.switches.switches())]
                before, after = [await _predicted(models, side.name, ids, switches) for side, switches in sides]

                def answer() -> answers.ChangesAnswer:
                    tokenizer = one.opened.tokenizer
                    change = text_change(before, after, ids, tokenizer)
                    pieces = zip(_tokens(tokenizer, ids), change.tokens, strict=True)
                    tokens = [piece | vars(token) for piece, token in pieces]
                    bits = {"bits_before": change.bits_before, "bits_after": change.bits_after}
                    return answers.ChangesAnswer.model_validate({"tokens": tokens} | bits)

                return await _written(answer)


def _run_routes(api: APIRouter, models: ServedModels, folders: ServedFolders) -> None:
    @api.get("/braid/runs", tags=["runs"])
    def runs() -> answers.RunsAnswer:
        """The runs and reports in the folders that the server was started with; new ones appear within seconds."""
        found = folders.found
        served = {folders.run_id(model.run): name for name, model in models.served.items()}
        listed = [run.summary() | {"model": served.get(run.id)} for run in found.runs.values()]
        reports = [vars(report) | {"url": f"/reports/{report.id}"} for report in found.reports.values()]
        return answers.RunsAnswer.model_validate({"runs": listed, "reports": reports})

    @api.get("/braid/runs/{run}/metrics", tags=["runs"])
    def metrics(run: str, after: str | None = Query(None, max_length=40)) -> answers.MetricsAnswer:
        """The records of a run's training and validation, also while it trains: give `next` as `after` for more."""
        return answers.MetricsAnswer.model_validate(folders.run(run).metrics(after))

    @api.get("/braid/runs/{run}/samples", tags=["runs"])
    def samples(run: str) -> answers.SamplesAnswer:
        """What the model wrote during training."""
        return answers.SamplesAnswer.model_validate({"samples": folders.run(run).samples()})

    @api.get("/reports/{report}", tags=["runs"], response_class=HTMLResponse)
    def report_page(report: str) -> HTMLResponse:
        """A report as a page, without an origin: whatever is in it reaches neither this server nor another."""
        return HTMLResponse(folders.report(report), headers={"Content-Security-Policy": REPORT_POLICY})


async def _predicted(models: ServedModels, name: str, ids: Sequence[int], switches: Switches) -> Any:
    engine = await models.engine(name)
    return await engine.call(lambda model: predict(model, ids), switches)


def _parts(opened: OpenedModel) -> dict[str, Any]:
    is_braid = isinstance(opened, OpenedBraid)
    if isinstance(opened, OpenedBraid):
        model: Any = opened.info.model
    else:
        assert isinstance(opened, OpenedDecoder)
        model = opened.skeleton(torch.float32)
    choosing = routing_modules(model) if is_braid else []
    labels = dict(zip(choosing, short_labels(model, choosing), strict=True)) if is_braid else {}
    return {
        "kind": opened.kind,
        "chat": chat_template(opened) is not None,
        "context": opened.context,
        "limit": opened.limit,
        "vocab_size": opened.vocab_size,
        "tokenizer": opened.tokenizer.fingerprint,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "paths": list(path_names(model)),
        "modules": [
            answers.Modules(
                layer=router.address.removesuffix(".router"), label=labels[router], names=list(router.choices)
            )
            for router in (module_routers(model) if is_braid else ())
        ],
        "gates": [gate_name(number) for number in gates_of(model)],
        "members": list(PartSwitches(model).members),
    }


async def _written(answer: Callable[[], BaseModel]) -> Response:
    """A large answer, made and written beside the event loop, which others are served by meanwhile."""
    return Response(await asyncio.to_thread(lambda: answer().model_dump_json()), media_type="application/json")


def _tokens(tokenizer: Any, ids: Sequence[int]) -> list[dict[str, Any]]:
    return [{"id": id, "text": text} for id, text in zip(ids, token_texts(tokenizer, ids), strict=True)]


def _read(found: ServedModel, text: str, param: str, more: Sequence[int] = ()) -> list[int]:
    """The tokens of a text and `more` after it, no more than are looked at."""
    opened = found.opened
    ids = [*encode_prompts(opened.tokenizer, [text])[0], *more]
    limit = min(opened.limit or answers.MAX_TOKENS, answers.MAX_TOKENS)
    if len(ids) > limit:
        what = f"{len(ids):,} tokens are too many: of a text for '{found.name}' at most {limit:,} are looked at"
        raise ApiError(400, what, param, "context_length_exceeded")
    if max(ids) >= opened.vocab_size:
        what = f"there is no token {max(ids)}: the vocabulary of '{found.name}' has {opened.vocab_size:,}"
        raise ApiError(400, what, "tokens")
    return ids


def _read_for_both(one: ServedModel, other: ServedModel, text: str) -> list[int]:
    """The tokens of a text that two models of one tokenizer predict."""
    if one.opened.tokenizer.fingerprint != other.opened.tokenizer.fingerprint:
        what = f"'{one.name}' and '{other.name}' have different tokenizers, so their tokens cannot be compared"
        raise ApiError(400, what, "other")
    ids = _read(one, text, "text")
    check_size(ids, max(one.opened.vocab_size, other.opened.vocab_size))
    return ids if other is one else _read(other, text, "text")
