"""COMPS (Misra, Rayz and Ettinger, 2023): properties of concepts, and made-up words that inherit them.

As in the BabyLM pipeline of 2025: is the property more probable after the concept that has it than after the one that
does not? The files are those of the BabyLM data or as published (https://huggingface.co/datasets/kanishka/comps), where
one file holds both kinds of distraction.
"""

from pathlib import Path

from braidlm.evals.babylm.conventions import SOURCE
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import Row, rows_of
from braidlm.evals.files.text_files import files_of
from braidlm.evals.formats.minimal_pairs import METRIC
from braidlm.evals.formats.ranked_options import Item, RankedOptions
from braidlm.evals.tasks.task import TASKS, Task

EXAMPLE = '{"prefix_acceptable": "A cat", "prefix_unacceptable": "A sock", "property_phrase": "can purr."}'
SETS = {
    "comps_base": "base",
    "comps_wugs": "wugs",
    "comps_wugs_dist-before": "wugs_dist_before",
    "comps_wugs_dist-in-between": "wugs_dist_in_between",
}
BOTH = "comps_wugs_dist"
DISTRACTIONS = {"before": "wugs_dist_before", "in-between": "wugs_dist_in_between"}


@TASKS.register("comps")
class Comps(Task):
    """All four sets."""

    description = "properties of concepts, and of made-up words that inherit them: the full evaluation of BabyLM 2025"
    size = "4 sets, 91,028 pairs"
    licence = "see the source (huggingface.co/datasets/kanishka/comps)"
    metric = METRIC
    babylm = ("full_eval/comps",)
    hub = HubSource("kanishka/comps", splits=("train",), sets=True)
    fetch = f"It is `full_eval/comps` of {SOURCE}. Or {hub.command}"

    def open(self, path: Path) -> RankedOptions:
        rows = rows_of(files_of(path, example=EXAMPLE), path, EXAMPLE)
        return RankedOptions([_item(row) for row in rows], rows.sha256, self.metric)


def _item(row: Row) -> Item:
    phrase = row.text("property_phrase")
    prefixes = (row.text("prefix_acceptable"), row.text("prefix_unacceptable"))
    options = tuple((f"{prefix} ", phrase) for prefix in prefixes)
    return Item(options, _set(row), tuple(f"{prefix} {phrase}" for prefix in prefixes))


def _set(row: Row) -> str:
    name = row.stem if row.stem.startswith("comps_") else f"comps_{row.stem}"  # the Hub's are called base, wugs ...
    if name == BOTH:
        kind = row.text("distraction_type")
        if kind not in DISTRACTIONS:
            raise row.error(f"'distraction_type' is to be one of {', '.join(DISTRACTIONS)}, not '{kind}'")
        return DISTRACTIONS[kind]
    if name not in SETS:
        raise row.error(f"'{row.stem}' is not a set of COMPS; there are {', '.join([*SETS, BOTH])}")
    return SETS[name]
