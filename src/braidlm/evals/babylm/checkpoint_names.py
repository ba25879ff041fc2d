"""What the name of a checkpoint says, where the BabyLM challenge's names are used: `chck_10M`."""

import re

SIZES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}


def words_of_name(name: str) -> int | None:
    """10,000,000 for `chck_10M`."""
    found = re.fullmatch(r"chck_(\d+(?:\.\d+)?)([kKMB]?)", name)
    return round(float(found[1]) * SIZES[found[2]]) if found else None
