"""The tasks that can be evaluated. A new one is a new file in this folder: nothing else has to know of it."""

import importlib
import pkgutil

from braidlm.evals.tasks.task import TASKS, OpenTask, Task

__all__ = ["TASKS", "OpenTask", "Task"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
