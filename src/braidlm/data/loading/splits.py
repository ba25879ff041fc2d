"""The splits of a corpus folder: text to train on and text to validate on, in folders of their own (as BabyLM's)."""

from pathlib import Path

from braidlm.core.errors import BraidError

HELD_OUT = "dev"


def splits(folder: str, train: str, name: str) -> tuple[str, str]:
    """The folders of training and of held-out text in a corpus that data set `name` is to be made of.

    Each is called `train` or `dev`, or is the only one whose name begins so: `train_10M`.
    """
    place = Path(folder).expanduser()
    advice = (
        f"Name it with `domains.{name}.folder=DIR` (in a recipe of one run, `data.sets.{name}.folder=DIR`): a folder "
        f"that holds a folder `{train}` (or one whose name begins so, such as `{train}_10M`) and a folder `{HELD_OUT}`."
    )
    if not place.is_dir():
        raise BraidError(f"the corpus '{name}' is not there: there is no such folder", folder, advice)
    return _split(place, train, name, advice), _split(place, HELD_OUT, name, advice)


def _split(place: Path, wanted: str, name: str, advice: str) -> str:
    if (place / wanted).is_dir():
        return str(place / wanted)
    found = sorted(item.name for item in place.iterdir() if item.is_dir() and item.name.startswith(wanted))
    if not found:
        raise BraidError(f"the corpus '{name}' has no folder `{wanted}`", str(place), advice)
    if len(found) > 1:
        raise BraidError(
            f"the corpus '{name}' has more than one folder that begins with `{wanted}`: {', '.join(found)}",
            str(place),
            f"Say which: `domains.{name}.split={found[0]}` (in a recipe of one run, `data.sets.{name}.split=...`)."
            if wanted != HELD_OUT
            else f"Leave only one, or give `source` and `validation` in place of `folder`, for example "
            f"validation={place / found[0]}.",
        )
    return str(place / found[0])
