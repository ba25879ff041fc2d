"""GLUE and SuperGLUE: a model is fine-tuned on labelled examples and then judged on others."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from braidlm.evals.babylm.data import COMMAND, SOURCE
from braidlm.evals.finetuning.data_sets import DATA_SETS, DataSet
from braidlm.evals.scoring.contestant import Settings
from braidlm.evals.tasks.task import TASKS, Task

if TYPE_CHECKING:
    from braidlm.evals.finetuning.labelled_task import LabelledTask

BABYLM = ("boolq", "mnli", "mrpc", "multirc", "qqp", "rte", "wsc")
"""What the challenge of 2025 kept of GLUE and SuperGLUE, in its order."""
BABYLM_DATA = f"`full_eval/glue_filtered` of {SOURCE}"
GLUE_DATA = "GLUE (https://gluebenchmark.com/tasks)"
ARCHIVES = {"cola": "CoLA", "sst2": "SST-2", "stsb": "STS-B", "qnli": "QNLIv2"}
ARCHIVE = " `curl -O https://dl.fbaipublicfiles.com/glue/data/{0}.zip && unzip {0}.zip -d DATA` gets it."
USES = ("seeds", *(field.name for field in fields(Settings) if field.name.startswith("finetune")))


class LabelledTaskKind(Task):
    """One of the data sets."""

    of: DataSet
    uses = USES

    def open(self, place: Path) -> "LabelledTask":
        from braidlm.evals.finetuning.labelled_task import open_labelled  # with torch, which a list has no use for

        return open_labelled(self.of, place)


def _kind(of: DataSet) -> type[LabelledTaskKind]:
    in_babylm = of.name in BABYLM
    files = of.files[0] if in_babylm else of.other_files[-1]
    source, how = (BABYLM_DATA, "") if in_babylm else (GLUE_DATA, ARCHIVE.format(ARCHIVES[of.name]))
    return type(
        of.task,
        (LabelledTaskKind,),
        {
            "__doc__": of.description,
            "of": of,
            "description": f"{of.description} (after fine-tuning)",
            "size": of.size,
            "licence": of.licence,
            "metric": f"{of.metric}, %",
            "places": of.places,
            "fetch": f"It is {files.train} and {files.valid} of {source}.{how}",
            "collection": COMMAND if in_babylm else "",
        },
    )


for _of in DATA_SETS:
    TASKS.register(_of.task)(_kind(_of))
