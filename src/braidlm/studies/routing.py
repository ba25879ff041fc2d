"""Who goes where in a study's models: the held-out documents of every domain, through every model that has paths."""

from pathlib import Path

from braidlm.core.folders import load_config
from braidlm.data.catalog import OpenData
from braidlm.routes.report import RoutingReport
from braidlm.routes.routes import routes
from braidlm.studies.results import StudyResults


def study_routes(results: StudyResults, data: OpenData, out: Path, tokens: int = 20_000) -> RoutingReport | None:
    """The routing report of the first seed's models, also as a page in `out`; None if no model has paths."""
    seed = results.study.seeds[0]
    found = {
        model.name: model.folder
        for model in results.models
        if model.seed == seed and model.kind != "path" and _has_paths(model.folder)
    }
    if not found:
        return None
    places = {stream.name: str(stream.data.folder) for stream in data.validation}
    shares = {results.study.domains[name].holdout for name in places if not results.study.domains[name].has_validation}
    held_out = shares.pop() if len(shares) == 1 else None
    return routes(found, data=places, tokens=tokens, held_out=held_out, out=out)


def _has_paths(folder: Path) -> bool:
    """Whether `braid routes` can say which path a token took; of a routed join the training's own records tell."""
    stages = load_config(folder).decoded().stages
    return any(stage.kind == "parallel" and stage.options.join.kind != "routed" for stage in stages)
