"""`braid routes` as a function: which path the tokens of prompts and data sets take, for one model or several."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from braidlm.core.decoding.prompts import USUAL, Prompt, read_prompts
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.routes.domains import check_given, right_paths
from braidlm.routes.folder import check_out, write_folder
from braidlm.routes.look import look
from braidlm.routes.opening import Place, open_models
from braidlm.routes.report import RoutingReport
from braidlm.routes.texts import Texts, data_sources, prompt_texts

TOKENS = 20_000
"""Of each data set, unless more or fewer are asked for."""


def routes(
    models: Place | Sequence[Place] | Mapping[str, Place],
    prompts: Place | Sequence[Prompt | str] | None = None,
    data: Mapping[str, Place] | None = None,
    *,
    paths: Sequence[str] | None = None,
    domains: Mapping[str, str] | None = None,
    tokens: int = TOKENS,
    held_out: float | None = None,
    out: Place | None = None,
    device: str = "auto",
    batch: int = 16,
) -> RoutingReport:
    """Who goes where in model folders or runs.

    `prompts` is a file or a list, by default (without `data`) the 20 of PaPaformer; `data` names packed folders or
    text; `paths` are those to be heard; `domains` says which path should know a domain of another name; `out` is a
    folder for tables, pictures and a page.
    """
    given = dict(domains or {})
    opened = open_models(models, paths)
    if out is not None:
        check_out(out)
    asked = _prompts(prompts, with_data=bool(data))
    sources = data_sources(data, tokens, held_out)
    if not asked and not sources:
        raise BraidError("there is nothing to look at", todo="Give prompts or data.")
    named = [*(prompt.domain for prompt in asked if prompt.domain), *(source.name for source in sources)]
    check_given(given, named, [path for model in opened for path in model.paths])
    right = [right_paths(named, model.paths, given, model.where) for model in opened]
    place = choose_device(device)
    # Every text is read and checked before any model runs; models of one tokenizer share the tokens.
    made: dict[tuple[str, int], Texts] = {}
    for model in opened:
        if model.reads not in made:
            shown = prompt_texts(asked, model.tokenizer, model.context, model.where)
            made[model.reads] = Texts(shown, {source.name: source.texts(model.tokenizer) for source in sources})
    found = [
        look(model, made[model.reads], paths_of, place, batch) for model, paths_of in zip(opened, right, strict=True)
    ]
    report = RoutingReport(found)
    if out is not None:
        write_folder(report, out)
    return report


def _prompts(given: Place | Sequence[Prompt | str] | None, with_data: bool) -> list[Prompt]:
    if given is None:
        return [] if with_data else read_prompts(USUAL)
    if isinstance(given, (str, Path)):
        return read_prompts(given)
    return [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in given]
