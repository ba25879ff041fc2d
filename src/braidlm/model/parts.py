"""Every part the model knows, by explicit relative import.

transformers copies into an exported folder only what is imported relatively, so this list is the one place to add to.
"""

from .attention.positions import position_kinds
from .attention.softmax import attentions
from .config.registry import Registry
from .feed.feeds import feeds
from .heads.embedding import embeddings, heads
from .initialisation import initialisations
from .norms import norms
from .paths.gumbel import joins
from .paths.parallel import ParallelStage
from .paths.project import ProjectStage
from .paths.routed_join import Routed
from .routing.losses import routing_losses
from .stages import stage_kinds

__all__ = ["ParallelStage", "ProjectStage", "Routed"]

REGISTRIES: dict[str, Registry] = {
    r.noun: r
    for r in (
        stage_kinds,
        attentions,
        feeds,
        joins,
        norms,
        position_kinds,
        embeddings,
        heads,
        initialisations,
        routing_losses,
    )
}
