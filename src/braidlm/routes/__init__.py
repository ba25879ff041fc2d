"""Who goes where: which path each token takes, and how that relates to the domain of the text.

This package has the name of its verb. Once any of its modules has been imported, `braidlm.routes` is the package and no
longer the function, so the package is callable: `braidlm.routes("my-model")` works either way.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from braidlm.routes.routes import routes

        return routes(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
