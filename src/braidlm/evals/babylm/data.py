"""Where the data of the BabyLM 2025 challenge usually lies, where to get it, and whose it is."""

FOLDERS = ("babylm-2025", "evaluation_data", "osfstorage/evaluation_data")
"""Under these names people keep the challenge's data; inside are `full_eval` and `fast_eval`."""
SOURCE = "the BabyLM 2025 evaluation data (https://osf.io/ryjfm/)"
COMMAND = (
    "`pip install osfclient && osf -p ryjfm clone DATA` gets the BabyLM 2025 data (its folder evaluation_data is all "
    "that is needed)."
)
"""How to get all of it; said once, however many of its tasks are asked for."""
LICENCE = "Apache 2.0 (BabyLM's files)"
"""What stands in the LICENSE beside the data; what the data was made of has terms of its own."""


def babylm_places(*paths: str) -> tuple[str, ...]:
    """The usual places of `full_eval/NAME` or `fast_eval/NAME`, inside the data folder; several are tried in turn."""
    found: list[str] = []
    for path in paths:
        found += [*(f"{folder}/{path}" for folder in FOLDERS), path, path.rpartition("/")[2]]
    return tuple(dict.fromkeys(found))


def babylm_fetch(path: str) -> str:
    """How to get it."""
    return f"It is `{path}` of {SOURCE}."
