"""Several data sets at once, with one tokenizer: `braid prepare train=DIR dev=DIR --out DIR`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, check_folder_name
from braidlm.data.packing.packed_data import PackedData, is_packed
from braidlm.data.packing.prepare import prepare

NAMED = re.compile(r"([\w-]+)=(.+)", re.DOTALL)


def named_sources(sources: Sequence[str]) -> dict[str, list[str]] | None:
    """The sources of each set if they are given as NAME=SOURCE; None if they are sources of one set."""
    matches = [None if Path(source).exists() else NAMED.fullmatch(source) for source in sources]
    if not any(matches):
        return None
    sets: dict[str, list[str]] = {}
    for source, match in zip(sources, matches, strict=True):
        if match is None:
            raise BraidError(
                "this source has no name, and others have",
                source,
                "Give every source as NAME=SOURCE to make several data sets, or none to make one.",
            )
        sets.setdefault(match[1], []).append(match[2])
    return sets


def prepare_sets(
    sets: Mapping[str, str | Path | Sequence[str | Path]],
    out: str | Path,
    *,
    tokenizer: str | Path = "bpe",
    **options: Any,
) -> dict[str, PackedData]:
    """Pack each set into a folder of its name in `out`.

    A tokenizer is trained on the first set only, since it should not see the text that the others hold out. `options`
    are those of `prepare`.
    """
    out = Path(out).expanduser()
    if is_packed(out):
        raise BraidError(
            "this is one data set, and several were to be put into it", str(out), "Choose another `--out`."
        )
    for name in sets:
        check_folder_name("the name of a data set", name)
    packed: dict[str, PackedData] = {}
    for name, sources in sets.items():
        packed[name] = prepare(sources, out / name, tokenizer=tokenizer, **options)
        tokenizer = packed[name].tokenizer_folder
        # All are of the first set's tokenizer.
        options |= {"vocab_size": None, "special_tokens": None, "begin": False, "space_before": "nothing"}
    return packed
