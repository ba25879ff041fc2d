"""Who goes where in a study's models: held-out documents of every domain, in every model with paths or experts."""

from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import load_config
from braidlm.data.loading.catalog import OpenData
from braidlm.routes.layers import routing_modules
from braidlm.routes.report import RoutingReport
from braidlm.routes.routes import routes
from braidlm.studies.results import StudyResults


def study_routes(results: StudyResults, data: OpenData, out: Path, tokens: int = 20_000) -> RoutingReport | None:
    """The routing report of the first seed's models, also as a page in `out`; None if none has paths or experts."""
    seed = results.study.seeds[0]
    found = {
        model.name: model.folder
        for model in results.models
        if model.seed == seed and model.kind != "path" and _chooses(model.folder)
    }
    if not found:
        return None
    places = {stream.name: str(stream.data.folder) for stream in data.validation}
    shares = {results.study.domains[name].holdout for name in places if not results.study.domains[name].has_validation}
    held_out = shares.pop() if len(shares) == 1 else None
    return routes(found, data=places, tokens=tokens, held_out=held_out, out=out)


def _chooses(folder: Path) -> bool:
    """Whether anything is chosen in a model: paths, or experts."""
    try:
        return bool(routing_modules(skeleton(load_config(folder))))
    except BraidError:
        return False
