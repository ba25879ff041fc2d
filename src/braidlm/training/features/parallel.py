"""The key of processes that share a model, and what cannot be used with it: it is said before anything starts."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.expert_parallel import check_banks
from braidlm.training.step.layout import ParallelConfig


@feature("training.parallel")
class Parallel(Feature):
    """What the step itself does (`step/layout.py`, `step/sharding.py`); the feature has its key and its refusals."""

    @dataclass
    class Keys:
        parallel: ParallelConfig = field(default_factory=ParallelConfig)
        """How several processes share the weights: auto, replicated, sharded, hybrid, or a mapping."""

    @classmethod
    def is_asked(cls, training: Any, data: DataConfig | None) -> bool:
        return cls.is_given(training) or int(os.environ.get("WORLD_SIZE", 1)) > 1

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        spread = training.parallel.weights in ("sharded", "hybrid")
        if training.graph:
            what = "training.graph: a step is replayed as a graph by one process that has all weights"
            todo = "Leave it out where several processes train, and where training.parallel shards weights."
            yield BraidError(what, todo=todo)
        if training.lora is not None and spread:
            what = "training.lora: adapters are merged into whole matrices, and training.parallel spreads these"
            todo = "Take training.parallel=replicated: adapters and their optimizer state are small."
            yield BraidError(what, todo=todo)

    @classmethod
    def check_model(cls, model: Any, training: Any, data: DataConfig) -> None:
        if training.parallel.experts > 1:
            check_banks(model, training.parallel.experts)

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        return []
