"""`braid routes` as a function: which path the tokens of prompts and data sets take, for one model or several."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from braidlm.core.decoding.prompts import DEFAULT_PROMPTS, Prompt, read_prompts
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.report.write import check_out, write
from braidlm.inspection.analysis import analyse, open_readable, paths_of
from braidlm.inspection.results import RoutingReport
from braidlm.inspection.routes_report import PAGE, routes_report
from braidlm.inspection.texts import Texts, check_domains, data_sources, prompt_texts, right_paths
from braidlm.opening.names import StrPath
from braidlm.opening.open import Names

TOKENS = 20_000
"""How many tokens of each data set are read, by default."""


def routes(
    models: Names,
    prompts: StrPath | Sequence[Prompt | str] | None = None,
    data: Mapping[str, StrPath] | None = None,
    *,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    domains: Mapping[str, str] | None = None,
    tokens: int = TOKENS,
    held_out: float | None = None,
    out: StrPath | None = None,
    back: str = "",
    device: str = "auto",
    batch: int = 16,
) -> RoutingReport:
    """Who goes where in models, each named by its folder, its run or its study (all that have paths, experts or gates).

    `prompts` is a file or a list, by default (without `data`) the 20 of PaPaformer; `data` names packed folders or
    text; `paths` are those to use, `without` modules that are switched off; `domains` says which path should know a
    domain of another name; `out` is a folder for tables, pictures and a page, which links `back` to a page that it
    belongs to.
    """
    path_of = dict(domains or {})
    opened = open_readable(models, paths, without)
    if out is not None:
        check_out(out, "braid routes", f"{PAGE}.html", fresh=True)
    loaded = _prompts(prompts, with_data=bool(data))
    sources = data_sources(data, tokens, held_out)
    if not loaded and not sources:
        raise BraidError("there is nothing to look at", todo="Give prompts or data.")
    named = [*(prompt.domain for prompt in loaded if prompt.domain), *(source.name for source in sources)]
    check_domains(path_of, named, [path for model in opened for path in paths_of(model)])
    right = [right_paths(named, paths_of(model), path_of, str(model.folder)) for model in opened]
    device = choose_device(device)
    # Every text is read and checked before any model runs; models of one tokenizer share the tokens.
    texts: dict[tuple[str, int | None], Texts] = {}
    keys = [(model.tokenizer.fingerprint, model.context) for model in opened]
    for key, model in zip(keys, opened, strict=True):
        if key not in texts:
            of_prompts = prompt_texts(loaded, model.tokenizer, model.context, str(model.folder))
            texts[key] = Texts(of_prompts, {source.name: source.texts(model.tokenizer) for source in sources})
    report = RoutingReport([])
    for key, model, of_domains in zip(keys, opened, right, strict=True):
        chosen, gates = analyse(model, texts[key], of_domains, device, batch)
        report.models += [] if chosen is None else [chosen]
        report.gated += [] if gates is None else [gates]
    if out is not None:
        write(routes_report(report, back), out, PAGE, fresh=True)
    return report


def _prompts(prompts: StrPath | Sequence[Prompt | str] | None, with_data: bool) -> list[Prompt]:
    if prompts is None:
        return [] if with_data else read_prompts(DEFAULT_PROMPTS)
    if isinstance(prompts, (str, Path)):
        return read_prompts(prompts)
    return [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
