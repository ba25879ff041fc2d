"""The verb `convert`: between Braid model folders and checkpoints of other formats."""

from pathlib import Path

from braidlm.bridges.bridge import bridges, folder_formats
from braidlm.bridges.exporting import Export
from braidlm.bridges.hugging_face import HuggingFaceBridge
from braidlm.bridges.importing import Import
from braidlm.bridges.locate import find_file, find_model, find_tokenizer
from braidlm.bridges.plan import Plan
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import read_json
from braidlm.model.config.registry import import_files

import_files("braidlm.bridges.formats")

NO_TOKENIZER = "no tokenizer.json (nor vocab.json with merges.txt)"


def convert(
    source: str | Path,
    out: str | Path | None = None,
    from_: str | None = None,
    to: str | None = None,
    dry_run: bool = False,
    config: str | Path | None = None,
) -> Plan:
    """Convert a checkpoint of another format into a Braid model folder (`from_`), or the other way round (`to`).

    `source` is a folder, or a name on the Hub where there is no such folder; of formats that are one file of weights,
    that file, with `config` the JSON file that says what the weights cannot. Nothing is written before every tensor
    is accounted for; with `dry_run` nothing is written at all. Without `from_` and `to` the source says what it is.
    """
    if from_ is not None and to is not None:
        raise BraidError("give either `--from` or `--to`", todo="One side of a conversion is always Braid.")
    if to is not None:
        _check_written(to)
    # An unknown name is an error before anything is looked for or downloaded.
    in_one_file = from_ is not None and bridges[from_].in_one_file
    if config is not None and not in_one_file:
        readers = ", ".join(name for name in bridges if bridges[name].in_one_file)
        raise BraidError(f"`--config` goes with `--from` {readers} only", todo="A folder has its own config.json.")
    if not dry_run:
        _check_out(out)
    found = find_file(source, config) if in_one_file else find_model(source)
    tokenizer = find_tokenizer(found.place)
    if tokenizer is None:
        lacking = "a file of weights has no tokenizer" if in_one_file else NO_TOKENIZER
        console.warn(f"{source}: {lacking}; the result has no tokenizer")
    kind = to or from_ or _kind_of(found.place)
    conversion = (Export if to else Import)(found, kind, bridges[kind](), tokenizer)
    for line in conversion.plan.lines():
        (console.show if dry_run else console.say)(line)
    if not dry_run:
        assert out is not None
        conversion.write(Path(out).expanduser())
        console.say(f"written: {out}")
    return conversion.plan


def _check_written(to: str) -> None:
    written = [name for name in bridges if issubclass(bridges[name], HuggingFaceBridge)]
    if not issubclass(bridges[to], HuggingFaceBridge):
        raise BraidError(f"Braid reads {bridges[to].title} and does not write it; it writes {', '.join(written)}")


def _check_out(out: str | Path | None) -> None:
    if out is None:
        raise BraidError("give the folder to write", todo="Add `--out DIR`, or `--dry-run` to see the plan only.")
    if Path(out).expanduser().exists():
        raise BraidError("this folder exists already", str(out), "Choose another name or remove it first.")


def _kind_of(folder: Path) -> str:
    """The format that a folder says it has."""
    data = read_json(folder / "config.json")
    kind = data.get("model_type") if isinstance(data, dict) else None
    known = ", ".join(folder_formats())
    if kind == "braid":
        raise BraidError(
            "this is a Braid model already", str(folder), f"Say what to make of it: `--to` one of {known}."
        )
    if kind not in folder_formats():
        raise BraidError(
            f"this folder holds a '{kind}' model; Braid reads {known}",
            str(folder),
            "If it is one of these under another name, say so with `--from`.",
        )
    return str(kind)
