"""Who goes where: which path each token takes, and what that has to do with what the text is about.

This room has the name of its verb. After any of its files has been imported, `braidlm.routes` is the room and no longer
the function, so the room can be called as the function is: `braidlm.routes("my-model")` works either way.
"""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from braidlm.routes.routes import routes

        return routes(*args, **options)


sys.modules[__name__].__class__ = _Room
