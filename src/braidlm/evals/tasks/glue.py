"""GLUE and SuperGLUE: a model is fine-tuned on labelled examples and evaluated on others."""

from dataclasses import fields
from pathlib import Path

from braidlm.evals.babylm.conventions import COMMAND, GLUE, SOURCE
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.finetuning.data_sets import DATA_SETS, DataSet
from braidlm.evals.tasks.task import TASKS, OpenTask, Task

ARCHIVES = {"cola": "CoLA", "sst2": "SST-2", "stsb": "STS-B", "qnli": "QNLIv2"}
ARCHIVE = " `curl -O https://dl.fbaipublicfiles.com/glue/data/{0}.zip && unzip {0}.zip -d DATA` gets it."


class FineTuningTask(Task):
    data_set: DataSet
    uses = ("seeds", *(field.name for field in fields(Settings) if field.name.startswith("finetune")))
    version = 2  # members of an average are fine-tuned apart

    def open(self, path: Path) -> OpenTask:
        from braidlm.evals.finetuning.labelled_task import read_labelled  # imports torch

        return read_labelled(self.data_set, path)


for _data_set in DATA_SETS:
    _in_babylm = _data_set.task in GLUE
    _files = _data_set.files[0] if _in_babylm else _data_set.other_files[-1]
    _source = f"`full_eval/glue_filtered` of {SOURCE}" if _in_babylm else "GLUE (https://gluebenchmark.com/tasks)"
    _site = "gluebenchmark.com" if _data_set.task.startswith("glue_") else "super.gluebenchmark.com"
    _command = "" if _in_babylm else ARCHIVE.format(ARCHIVES[_data_set.name])
    TASKS.declare(
        _data_set.task,
        FineTuningTask,
        f"{_data_set.description} (after fine-tuning)",
        _data_set.size,
        data_set=_data_set,
        licence=f"that of the original data set (see {_site}/faq)",  # neither collection has its own
        metric=f"{_data_set.metric}, %",
        locations=_data_set.locations,
        fetch=f"It is {_files.train} and {_files.valid} of {_source}.{_command}",
        collection=COMMAND if _in_babylm else "",
    )
