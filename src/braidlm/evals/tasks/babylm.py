"""The tasks of the BabyLM 2025 challenge, but for GLUE; and BLiMP as published.

- BLiMP and its supplement: grammatical knowledge by minimal pairs.
- COMPS (Misra, Rayz and Ettinger, 2023): is a property more probable after the concept that has it than after one that
  does not? The files are those of the BabyLM data or as published (https://huggingface.co/datasets/kanishka/comps),
  where one file holds both kinds of distraction.
- Entity tracking (Kim and Schuster, 2023): of five contents of a box after things were moved about, the right one is to
  be the most probable. Accuracy by the number of moves, the mean over those of each split, then over splits.
- EWoK (Ivanova and others, 2024): which of two sentences fits a context. Its plain text is to stay out of training
  corpora: it is read from its password-protected archive, or from a folder that you unpacked, and never written.
- Reading times, made-up words and age of acquisition: see `babylm/`.
"""

from pathlib import Path

from braidlm.evals.babylm.acquisition import read_acquisition
from braidlm.evals.babylm.conventions import COMMAND, LICENCE, SOURCE, babylm_locations
from braidlm.evals.babylm.reading import read_reading_times
from braidlm.evals.babylm.wug import read_forms
from braidlm.evals.formats.options import METRIC, Item, RankedOptions, read_pairs
from braidlm.evals.rows import Row, protected_files, read_rows, rows_of
from braidlm.evals.tasks.task import TASKS, HubSource, Task

IN_FULL, IN_FAST = "full evaluation of BabyLM 2025", "fast evaluation of BabyLM 2025, for checkpoints"


class _MinimalPairTask(Task):
    metric = METRIC
    licence = LICENCE
    open = staticmethod(read_pairs)


@TASKS.register("blimp")
class Blimp(_MinimalPairTask):
    """BLiMP as published (Warstadt and others, 2020)."""

    description = "BLiMP as published: is the grammatical sentence of a minimal pair more probable?"
    size = "67 sets of 1,000 pairs"
    licence = "CC BY 4.0"
    locations = ("blimp/data", "blimp")
    hub = HubSource("nyu-mll/blimp", splits=("train",), sets=True)
    fetch = f"`git clone https://github.com/alexwarstadt/blimp DATA/blimp`, or {hub.command}"


class _FilteredBlimp(_MinimalPairTask):
    licence = f"CC BY 4.0 (BLiMP), {LICENCE}"


_about = f"BLiMP with only words of the BabyLM corpora: the {IN_FULL}"
TASKS.declare("blimp_filtered", _FilteredBlimp, _about, "67 sets, 59,875 pairs", "full_eval/blimp_filtered")
_about = f"a fifth of BLiMP: the {IN_FAST}"
TASKS.declare("blimp_fast", _FilteredBlimp, _about, "67 sets of 200 pairs", "fast_eval/blimp_fast")
_about = f"minimal pairs of dialogue, questions and hypernyms: the {IN_FULL}"
TASKS.declare("blimp_supplement", _MinimalPairTask, _about, "5 sets, 5,218 pairs", "full_eval/supplement_filtered")
_about = f"a part of the BLiMP supplement: the {IN_FAST}"
TASKS.declare("supplement_fast", _MinimalPairTask, _about, "5 sets of 50 pairs", "fast_eval/supplement_fast")

COMPS_EXAMPLE = '{"prefix_acceptable": "A cat", "prefix_unacceptable": "A sock", "property_phrase": "can purr."}'
BOTH = "comps_wugs_dist"
DISTRACTIONS = {"before": "wugs_dist_before", "in-between": "wugs_dist_in_between"}
COMPS_SETS = {"comps_base": "base", "comps_wugs": "wugs"}
COMPS_SETS |= {f"{BOTH}-{kind}": name for kind, name in DISTRACTIONS.items()}


@TASKS.register("comps")
class Comps(Task):
    description = "properties of concepts, and of made-up words that inherit them: the full evaluation of BabyLM 2025"
    size = "4 sets, 91,028 pairs"
    licence = "see the source (huggingface.co/datasets/kanishka/comps)"
    metric = METRIC
    babylm = ("full_eval/comps",)
    hub = HubSource("kanishka/comps", splits=("train",), sets=True)
    fetch = f"It is `full_eval/comps` of {SOURCE}. Or {hub.command}"

    def open(self, path: Path) -> RankedOptions:
        rows = read_rows(path, COMPS_EXAMPLE)
        items = []
        for row in rows:
            phrase = row.text("property_phrase")
            prefixes = (row.text("prefix_acceptable"), row.text("prefix_unacceptable"))
            options = tuple((f"{prefix} ", phrase) for prefix in prefixes)
            items.append(Item(options, _comps_set(row), tuple(f"{prefix} {phrase}" for prefix in prefixes)))
        return RankedOptions(items, rows.sha256, self.metric)


def _comps_set(row: Row) -> str:
    name = row.stem if row.stem.startswith("comps_") else f"comps_{row.stem}"  # the Hub's are called base, wugs ...
    if name == BOTH:
        kind = row.text("distraction_type")
        if kind not in DISTRACTIONS:
            raise row.error(f"'distraction_type' is to be one of {', '.join(DISTRACTIONS)}, not '{kind}'")
        return DISTRACTIONS[kind]
    if name not in COMPS_SETS:
        raise row.error(f"'{row.stem}' is not a set of COMPS; there are {', '.join([*COMPS_SETS, BOTH])}")
    return COMPS_SETS[name]


ENTITY_EXAMPLE = (
    '{"numops": 0, "input_prefix": "Box 0 contains the key. Box 0 contains ", "options": ["the key.", "the hat."]}'
)


class _EntityTracking(Task):
    metric = "accuracy, % (mean over numbers of moves, then over splits)"
    licence = f"{LICENCE}; its authors name none (github.com/sebschu/entity-tracking-lms)"

    def open(self, path: Path) -> RankedOptions:
        rows = read_rows(path, ENTITY_EXAMPLE)
        items, splits = [], {}
        for row in rows:
            moves, prefix, options = row.number("numops"), row.text("input_prefix"), tuple(row.texts("options"))
            if moves != int(moves) or moves < 0:
                raise row.error(f"'numops' is to be a number of moves, not {moves:g}")
            set_name = f"{row.stem}_{int(moves)}_ops"
            splits[set_name] = row.stem
            items.append(Item(tuple((prefix, option) for option in options), set_name, options))
        return RankedOptions(items, rows.sha256, self.metric, splits)


_about = f"what is in a box after things were moved about? The {IN_FULL}"
_size = "3 splits, 9,483 items of 5 options"
TASKS.declare("entity_tracking", _EntityTracking, _about, _size, "full_eval/entity_tracking")
_about, _size = f"one split of entity tracking: the {IN_FAST}", "1 split, 3,152 items of 5 options"
TASKS.declare("entity_tracking_fast", _EntityTracking, _about, _size, "fast_eval/entity_tracking_fast")

PASSWORDS = ("ewok", "BabyLM2025")
"""The passwords of the published archives; they keep crawlers out, not people."""
EWOK_EXAMPLE = '{"Domain": "...", "Context1": "...", "Target1": "...", "Target2": "..."}'


class _Ewok(Task):
    metric = "accuracy, % (mean over domains)"
    licence = (
        "its own terms (huggingface.co/datasets/ewok-core/ewok-core-1.0): no plain text published, no training on it"
    )
    folder_names: tuple[str, ...]
    """Names of its folder in an archive that has several."""

    def open(self, path: Path) -> RankedOptions:
        rows = rows_of(protected_files(path, self.folder_names, PASSWORDS), path, EWOK_EXAMPLE)
        items = []
        for row in rows:
            context = row.text("Context1")
            answers = (f" {row.text('Target1')}", f" {row.text('Target2')}")
            options = tuple((context, answer) for answer in answers)
            items.append(Item(options, str(row.fields.get("Domain") or row.stem), answers))
        return RankedOptions(items, rows.sha256, self.metric)


TASKS.declare(
    "ewok",
    _Ewok,
    f"world knowledge: which of two sentences fits a context? The {IN_FULL}",
    "11 domains, 7,618 items",
    folder_names=("full", "ewok_filtered", "ewok_full"),
    locations=(*babylm_locations("full_eval/ewok_filtered"), "ewok/full", "ewok.zip", "ewok_filtered.zip"),
    fetch="Agree to its terms at https://huggingface.co/datasets/ewok-core/ewok-core-1.0, then `python -m "
    "evaluation_pipeline.ewok.dl_and_filter` of the BabyLM 2025 pipeline writes `full_eval/ewok_filtered`.",
)
TASKS.declare(
    "ewok_fast",
    _Ewok,
    f"a part of EWoK: the {IN_FAST}",
    "11 domains of 100 items",
    folder_names=("fast", "ewok_fast"),
    locations=(
        *(*babylm_locations("fast_eval/ewok_fast"), "ewok/fast", "ewok.zip"),
        *babylm_locations("fast_eval/ewok_fast.zip"),
    ),
    fetch="It is `fast_eval/ewok_fast.zip` of the BabyLM 2025 evaluation data (https://osf.io/ryjfm/), read as it is.",
    collection=COMMAND,
)


@TASKS.register("reading")
class Reading(Task):
    """Eye tracking and self-paced reading (de Varda, Marelli and Amenta, 2023), each as a part."""

    description = "does surprisal say where people read slowly? Fast and full evaluation of BabyLM 2025"
    size = "1,726 words of 205 sentences"
    licence = f"{LICENCE}; of the original see doi.org/10.3758/s13428-023-02261-8"
    metric = "gain in explained variance, % (mean of eye tracking and self-paced)"
    babylm = ("full_eval/reading", "fast_eval/reading", "reading/reading_data.csv")
    fetch = f"It is `full_eval/reading/reading_data.csv` of {SOURCE}."
    open = staticmethod(read_reading_times)


class _MadeUp(Task):
    metric = "Spearman's correlation with people, x 100"
    licence = f"{LICENCE}; of the originals see their papers"
    open = staticmethod(read_forms)


# Hofmann and others (2024).
_about = "nouns of made-up adjectives, -ity or -ness: as people would? Fast and full evaluation of BabyLM 2025"
_files = ("full_eval/wug_adj_nominalization", "fast_eval/wug_adj_nominalization")
TASKS.declare("wug_adj", _MadeUp, _about, "200 words", *_files)
# Regular, or like an irregular verb (Weissweiler and others, 2023).
_about = "the past tense of made-up verbs: as people would form it? Fast and full evaluation of BabyLM 2025"
TASKS.declare("wug_past", _MadeUp, _about, "50 words", "full_eval/wug_past_tense", "fast_eval/wug_past_tense")


@TASKS.register("aoa")
class AgeOfAcquisition(Task):
    """Chang and Bergen (2022), with children's data of Wordbank: a task of whole runs (`--all-checkpoints`)."""

    description = "are words learned in children's order? Over all checkpoints of a run; BabyLM 2025"
    size = "485 words in 8,005 contexts"
    version = 2  # words with fewer than 20 contexts count too
    licence = f"{LICENCE}; of the children's data see wordbank.stanford.edu"
    metric = "Pearson's correlation with children's ages, x 100; of a checkpoint mean surprisal"
    babylm = ("full_eval/aoa", "full_eval/cdi_childes")
    open = staticmethod(read_acquisition)
