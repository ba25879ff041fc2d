"""Every part the model knows, by explicit relative import.

transformers copies into an exported folder only what is imported relatively, so this list is the one place to add to.
"""

from .attention import attentions
from .embedding import embeddings, heads
from .feed import feeds
from .initialisation import initialisations
from .norms import norms
from .positions import position_kinds
from .registry import Registry
from .stages import stage_kinds

REGISTRIES: dict[str, Registry] = {
    r.noun: r for r in (stage_kinds, attentions, feeds, norms, position_kinds, embeddings, heads, initialisations)
}
