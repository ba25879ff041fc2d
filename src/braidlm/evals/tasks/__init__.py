"""The tasks that can be evaluated. A new one is a new file in this folder and needs no registration elsewhere."""

from braidlm.evals.tasks.task import TASKS, OpenTask, Task
from braidlm.model.config.registry import import_files

__all__ = ["TASKS", "OpenTask", "Task"]

import_files(__name__)
