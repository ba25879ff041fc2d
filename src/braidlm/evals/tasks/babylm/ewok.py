"""EWoK (Ivanova and others, 2024): which of two sentences fits a context, by knowledge of the world.

As in the BabyLM pipeline of 2025: after the first context, is the first target more probable than the second? The
plain text of EWoK is to stay out of training corpora: it is read from its password-protected archive, or from a folder
that you unpacked, and never written.
"""

from pathlib import Path

from braidlm.evals.babylm.conventions import COMMAND, babylm_locations
from braidlm.evals.files.json_rows import rows_of
from braidlm.evals.files.protected_zip import protected_files
from braidlm.evals.formats.ranked_options import Item, RankedOptions
from braidlm.evals.tasks.task import TASKS, Task

PASSWORDS = ("ewok", "BabyLM2025")
"""Of the published archives; they keep crawlers out, not people."""
EXAMPLE = '{"Domain": "...", "Context1": "...", "Target1": "...", "Target2": "..."}'


class _Ewok(Task):
    metric = "accuracy, % (mean over domains)"
    licence = (
        "its own terms (huggingface.co/datasets/ewok-core/ewok-core-1.0): no plain text published, no training on it"
    )
    folder_names: tuple[str, ...]
    """Names of its folder in an archive that has several."""

    def open(self, path: Path) -> RankedOptions:
        files = protected_files(path, self.folder_names, PASSWORDS)
        rows = rows_of(files, path, EXAMPLE)
        items = []
        for row in rows:
            context = row.text("Context1")
            answers = (f" {row.text('Target1')}", f" {row.text('Target2')}")
            options = tuple((context, answer) for answer in answers)
            items.append(Item(options, str(row.fields.get("Domain") or row.stem), answers))
        return RankedOptions(items, rows.sha256, self.metric)


@TASKS.register("ewok")
class Ewok(_Ewok):
    """The items with only words of the BabyLM corpora: the challenge's full evaluation."""

    description = "world knowledge: which of two sentences fits a context? The full evaluation of BabyLM 2025"
    size = "11 domains, 7,618 items"
    folder_names = ("full", "ewok_filtered", "ewok_full")
    locations = (*babylm_locations("full_eval/ewok_filtered"), "ewok/full", "ewok.zip", "ewok_filtered.zip")
    fetch = (
        "Agree to its terms at https://huggingface.co/datasets/ewok-core/ewok-core-1.0, then `python -m "
        "evaluation_pipeline.ewok.dl_and_filter` of the BabyLM 2025 pipeline writes `full_eval/ewok_filtered`."
    )


@TASKS.register("ewok_fast")
class EwokFast(_Ewok):
    """100 items of each domain: the challenge's fast evaluation, for checkpoints."""

    description = "a part of EWoK: the fast evaluation of BabyLM 2025, for checkpoints"
    size = "11 domains of 100 items"
    folder_names = ("fast", "ewok_fast")
    locations = (
        *babylm_locations("fast_eval/ewok_fast"),
        "ewok/fast",
        "ewok.zip",
        *babylm_locations("fast_eval/ewok_fast.zip"),
    )
    fetch = "It is `fast_eval/ewok_fast.zip` of the BabyLM 2025 evaluation data (https://osf.io/ryjfm/), read as it is."
    collection = COMMAND
