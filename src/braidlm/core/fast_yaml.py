"""YAML by libyaml, which PyYAML's wheels contain and which reads ten times as fast as Python does.

Its messages do not show the line they speak of. What it refuses is therefore read again by PyYAML's own loader.
"""

import functools
from typing import Any

import yaml

FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def hasten_omegaconf() -> Any:
    """Let OmegaConf read YAML by libyaml, and make the class that does so once instead of for every file.

    Returns OmegaConf's own class.
    """
    from omegaconf import _utils

    own = _utils.get_yaml_loader()
    fast = own if FastLoader is yaml.SafeLoader else type("FastOmegaConfLoader", (FastLoader, own), {})
    _utils.get_yaml_loader = lambda: fast
    return own
