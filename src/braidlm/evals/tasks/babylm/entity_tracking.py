"""Entity tracking (Kim and Schuster, 2023): what is in a box after things were moved about?

As in the BabyLM pipeline of 2025: of five contents the right one is to be the most probable continuation. Accuracy by
the number of moves, the mean over those of each split, then over splits.
"""

from pathlib import Path

from braidlm.evals.babylm.conventions import LICENCE
from braidlm.evals.files.json_rows import rows_of
from braidlm.evals.files.text_files import files_of
from braidlm.evals.formats.ranked_options import Item, RankedOptions
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = (
    '{"numops": 0, "input_prefix": "Box 0 contains the key. Box 0 contains ", "options": ["the key.", "the hat."]}'
)


class _EntityTracking(Task):
    metric = "accuracy, % (mean over numbers of moves, then over splits)"
    licence = f"{LICENCE}; its authors name none (github.com/sebschu/entity-tracking-lms)"

    def open(self, path: Path) -> RankedOptions:
        rows = rows_of(files_of(path, example=EXAMPLE), path, EXAMPLE)
        items, splits = [], {}
        for row in rows:
            moves, prefix, options = row.number("numops"), row.text("input_prefix"), tuple(row.texts("options"))
            if moves != int(moves) or moves < 0:
                raise row.error(f"'numops' is to be a number of moves, not {moves:g}")
            set_name = f"{row.stem}_{int(moves)}_ops"
            splits[set_name] = row.stem
            items.append(Item(tuple((prefix, option) for option in options), set_name, options))
        return RankedOptions(items, rows.sha256, self.metric, splits)


@TASKS.register("entity_tracking")
class EntityTracking(_EntityTracking):
    """Three splits: the challenge's full evaluation."""

    description = "what is in a box after things were moved about? The full evaluation of BabyLM 2025"
    size = "3 splits, 9,483 items of 5 options"
    babylm = ("full_eval/entity_tracking",)


@TASKS.register("entity_tracking_fast")
class EntityTrackingFast(_EntityTracking):
    """One split: the challenge's fast evaluation, for checkpoints."""

    description = "one split of entity tracking: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "1 split, 3,152 items of 5 options"
    babylm = ("fast_eval/entity_tracking_fast",)
