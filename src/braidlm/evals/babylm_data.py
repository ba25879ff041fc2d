"""Where the data of the BabyLM 2025 challenge usually lies, and where to get it."""

FOLDERS = ("babylm-2025", "evaluation_data")
"""Under these names people keep the challenge's data; inside are `full_eval` and `fast_eval`."""
SOURCE = "the BabyLM 2025 evaluation data (https://osf.io/ryjfm/, folder evaluation_data)"


def babylm_places(*paths: str) -> tuple[str, ...]:
    """The usual places of `full_eval/NAME` or `fast_eval/NAME`, inside the data folder; several are tried in turn."""
    found: list[str] = []
    for path in paths:
        found += [*(f"{folder}/{path}" for folder in FOLDERS), path, path.rpartition("/")[2]]
    return tuple(dict.fromkeys(found))


def babylm_fetch(path: str) -> str:
    """How to get it."""
    return f"It is `{path}` of {SOURCE}."
