"""GLUE and SuperGLUE: a model is fine-tuned on labelled examples and evaluated on others."""

from dataclasses import fields
from pathlib import Path

from braidlm.evals.babylm.conventions import COMMAND, GLUE, SOURCE
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.data_sets import DATA_SETS, DataSet
from braidlm.evals.tasks.task import TASKS, OpenTask, Task

BABYLM_DATA = f"`full_eval/glue_filtered` of {SOURCE}"
GLUE_DATA = "GLUE (https://gluebenchmark.com/tasks)"
ARCHIVES = {"cola": "CoLA", "sst2": "SST-2", "stsb": "STS-B", "qnli": "QNLIv2"}
ARCHIVE = " `curl -O https://dl.fbaipublicfiles.com/glue/data/{0}.zip && unzip {0}.zip -d DATA` gets it."
USES = ("seeds", *(field.name for field in fields(Settings) if field.name.startswith("finetune")))


class FineTuningTask(Task):
    """One of the data sets."""

    data_set: DataSet
    uses = USES
    version = 2  # members of an average are fine-tuned apart

    def open(self, path: Path) -> OpenTask:
        from braidlm.evals.finetuning.examples import read_labelled
        from braidlm.evals.finetuning.labelled_task import LabelledTask  # imports torch

        return LabelledTask(read_labelled(self.data_set, path))


def _task(data_set: DataSet) -> type[FineTuningTask]:
    in_babylm = data_set.task in GLUE
    files = data_set.files[0] if in_babylm else data_set.other_files[-1]
    source, command = (BABYLM_DATA, "") if in_babylm else (GLUE_DATA, ARCHIVE.format(ARCHIVES[data_set.name]))
    return type(
        data_set.task,
        (FineTuningTask,),
        {
            "__doc__": data_set.description,
            "data_set": data_set,
            "description": f"{data_set.description} (after fine-tuning)",
            "size": data_set.size,
            "licence": data_set.licence,
            "metric": f"{data_set.metric}, %",
            "locations": data_set.locations,
            "fetch": f"It is {files.train} and {files.valid} of {source}.{command}",
            "collection": COMMAND if in_babylm else "",
        },
    )


for _data_set in DATA_SETS:
    TASKS.register(_data_set.task)(_task(_data_set))
