"""The verb `convert`: between Braid model folders and checkpoints of other formats."""

from pathlib import Path

from braidlm.bridges.bridge import ExportingBridge, bridges, folder_formats
from braidlm.bridges.exporting import Export
from braidlm.bridges.importing import Import
from braidlm.bridges.locate import find_file, find_tokenizer, locate_model
from braidlm.bridges.opening import BRAID, model_type
from braidlm.bridges.plan import ConversionPlan
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import check_new_folder
from braidlm.core.reading import given_path

NO_TOKENIZER = "no tokenizer.json (nor vocab.json with merges.txt)"


def convert(
    source: str | Path,
    out: str | Path | None = None,
    from_: str | None = None,
    to: str | None = None,
    dry_run: bool = False,
    config: str | Path | None = None,
) -> ConversionPlan:
    """Convert a checkpoint of another format into a Braid model folder (`from_`), or the other way round (`to`).

    `source` is a folder, a run or one model of a study, or a name on the Hub where there is no such folder. For formats
    that are one file of weights it is that file, and `config` is the JSON file with the settings that the weights do
    not show. Nothing is written before every tensor is accounted for, and with `dry_run` nothing at all. Without
    `from_` and `to` the format is the one that the source's config.json names.
    """
    if from_ is not None and to is not None:
        raise BraidError("give either `--from` or `--to`", todo="One side of a conversion is always Braid.")
    if to is not None:
        _check_export_format(to)
    # An unknown name must be an error before any search or download.
    single_file = from_ is not None and bridges[from_].single_file
    if single_file and from_ is not None and bridges[from_].folder:
        single_file = given_path(source).is_file()
    if config is not None and not single_file:
        formats = ", ".join(name for name in bridges if bridges[name].single_file)
        raise BraidError(f"`--config` goes with `--from` {formats} only", todo="A folder has its own config.json.")
    if not dry_run:
        check_new_folder(out)
    location = find_file(source, config) if single_file else locate_model(source)
    tokenizer = find_tokenizer(location.path)
    if tokenizer is None:
        reason = "a file of weights has no tokenizer" if single_file else NO_TOKENIZER
        console.warn(f"{source}: {reason}; the result has no tokenizer")
    kind = to or from_ or _format_of(location.path)
    conversion = (Export if to else Import)(location, kind, bridges[kind](), tokenizer)
    for line in conversion.plan.lines():
        (console.show if dry_run else console.say)(line)
    if not dry_run:
        assert out is not None
        conversion.write(given_path(out))
        console.say(f"written: {out}")
    return conversion.plan


def _check_export_format(to: str) -> None:
    if not issubclass(bridges[to], ExportingBridge):
        exported = ", ".join(name for name in bridges if issubclass(bridges[name], ExportingBridge))
        raise BraidError(f"Braid reads {bridges[to].title} and does not write it; it writes {exported}")


def _format_of(folder: Path) -> str:
    """The format that a folder's config.json names."""
    kind, known = model_type(folder), ", ".join(folder_formats())
    if kind == BRAID:
        raise BraidError(
            "this is a Braid model already", str(folder), f"Say what to make of it: `--to` one of {known}."
        )
    if kind not in folder_formats():
        raise BraidError(
            f"this folder holds a '{kind}' model; Braid reads {known}",
            str(folder),
            "If it is one of these under another name, say so with `--from`.",
        )
    return kind
