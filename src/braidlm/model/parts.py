"""Every part the model knows, by explicit relative import.

transformers copies into an exported folder only what is imported relatively, so this list is the one place to add to.
"""

from .attention import attentions
from .embedding import embeddings, heads
from .feed import feeds
from .gumbel import joins
from .initialisation import initialisations
from .norms import norms
from .parallel import ParallelStage
from .positions import position_kinds
from .project import ProjectStage
from .registry import Registry
from .routed_join import Routed
from .routing_losses import routing_losses
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
