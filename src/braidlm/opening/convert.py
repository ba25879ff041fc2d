"""The verb `convert`: between Braid model folders and checkpoints of other formats, and from adapters to one folder."""

from pathlib import Path

import torch

from braidlm.bridges.bridge import (
    ConversionPlan,
    Export,
    ExportingBridge,
    Import,
    TensorMapping,
    bridges,
    export_formats,
    folder_formats,
)
from braidlm.core import console
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import atomic_folder, check_new_folder
from braidlm.core.models.folders import model_type
from braidlm.core.reading import check_openable, given_path
from braidlm.opening.braid import BRAID
from braidlm.opening.decoder import OpenedDecoder, decoder_notes
from braidlm.opening.gated_folders import write_whole_files
from braidlm.opening.names import find_or_fetch, named
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel, find_tokenizer

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files that hold a whole model's weights; torch.save writes all but the first."""
TRANSFORMERS = "transformers"
"""What `to` calls the one folder that is made of a decoder of transformers and its adapters."""


def convert(
    source: str | Path,
    out: str | Path | None = None,
    from_: str | None = None,
    to: str | None = None,
    dry_run: bool = False,
    config: str | Path | None = None,
    dtype: str | None = None,
) -> ConversionPlan:
    """Convert a checkpoint of another format into a Braid model folder (`from_`), or the other way round (`to`).

    `source` is a folder, a run or one model of a study, or a name on the Hub where there is no such folder. For formats
    that are one file of weights it is that file, and `config` is the JSON file with the settings that the weights do
    not show. Nothing is written before every tensor is accounted for, and with `dry_run` nothing at all. Without
    `from_` and `to` the format is the one that the source's config.json names. `out` is a folder, or a file where the
    format is one, and `dtype` the type of its weights where the format has several. Of gates or LoRA of a decoder, `to`
    "transformers" makes one folder.
    """
    if from_ is not None and to is not None:
        raise BraidError("give either `--from` or `--to`", todo="One side of a conversion is always Braid.")
    # An unknown name must be an error before any search or download.
    exporting = None if to in (None, TRANSFORMERS) else _exporting_bridge(to, dtype)
    if dtype is not None and exporting is None:
        raise BraidError("`--dtype` goes with `--to` only", todo="Braid's own folders hold float32.")
    single_file = False
    if from_ is not None:
        bridge = bridges[from_]
        if not (bridge.folder or bridge.single_file):
            todo = "Convert the model that it was made from."
            raise BraidError(f"Braid writes {bridge.title} and does not read it", todo=todo)
        single_file = bridge.single_file and (not bridge.folder or given_path(source).is_file())
    if config is not None and not single_file:
        formats = ", ".join(name for name in bridges if bridges[name].single_file)
        raise BraidError(f"`--config` goes with `--from` {formats} only", todo="A folder has its own config.json.")
    if not dry_run:
        _check_out(out, exporting)
    if to == TRANSFORMERS:
        return _carry_out(Whole(open_model(source, "own", bare=True)), out, dry_run)
    if single_file:
        path = given_path(source)
        if path.is_dir():
            raise BraidError("this is a folder; give the file of the weights", str(source))
        check_openable(path)
        if not path.is_file():
            raise BraidError("there is no such file", str(source))
        if path.suffix not in WEIGHT_SUFFIXES:
            raise BraidError(f"this is no file of weights that Braid reads ({', '.join(WEIGHT_SUFFIXES)})", str(source))
        name, reason = path.name, "a file of weights has no tokenizer"
    else:
        path, hub = find_or_fetch(source, bare=True)
        name, reason = named(path, hub), "no tokenizer.json (nor vocab.json with merges.txt)"
    if (tokenizer := find_tokenizer(path)) is None:
        console.warn(f"{source}: {reason}; the result has no tokenizer")
    conversion: Export | Import
    if exporting is not None and to is not None:
        conversion = Export(path, name, to, exporting, tokenizer)
    else:
        given = None if config is None else given_path(config)
        conversion = Import(path, name, from_ or _format_of(path), tokenizer, given)
    return _carry_out(conversion, out, dry_run)


def _carry_out(conversion: "Export | Import | Whole", out: str | Path | None, dry_run: bool) -> ConversionPlan:
    """Show the plan; unless it is a dry run, write the result."""
    console.say_plan(conversion.plan.summary(), conversion.plan.details(), dry_run)
    if out is not None and not dry_run:
        conversion.write(given_path(out))
        console.say(f"written: {out}")
    return conversion.plan


class Whole:
    """A decoder of transformers with its adapters as one folder: LoRA merged, gates inside the model."""

    def __init__(self, opened: OpenedModel):
        if not isinstance(opened, OpenedDecoder):
            what = "this is a Braid model, a whole folder that transformers opens already"
            raise BraidError(what, opened.title, f"Other formats are {', '.join(export_formats())}.")
        if opened.base is None:
            what = "this is a decoder without adapters, a whole folder that transformers opens already"
            raise BraidError(what, opened.title, "Name the folder or run of its gates or LoRA adapters.")
        opened.check()
        self.opened, own = opened, getattr(opened.config, "dtype", None) or torch.float32
        # The sum of a rounded matrix and its adapters would be rounded again.
        self.dtype = torch.float32 if any(part.has_lora for part in opened.parts) else own
        self.shapes = {name: tuple(t.shape) for name, t in opened.skeleton(self.dtype).state_dict().items()}
        notes = decoder_notes(opened)
        if self.dtype != own:
            notes.append(f"the base is {_short(own)}; with LoRA merged, which is exact in float32, it is written so")
        title = f"{opened.title} and its base {opened.parts[-1].title} to one folder of transformers"
        self.plan = ConversionPlan(title, [TensorMapping(n, (n,)) for n in self.shapes], self.shapes, True, notes)

    @torch.no_grad()
    def write(self, out: Path) -> None:
        """Write the folder in one atomic step, after it has been opened again and computes the same."""
        model = self.opened.load(dtype=self.dtype)
        config = self.opened.config.get_text_config()
        ids = torch.arange(min(32, self.opened.context or 32))[None] * 7 % config.vocab_size
        before = model(ids).logits
        source = {**self.opened.record(), "lineage": self.opened.lineage}
        lineage = {"made_by": f"convert to {TRANSFORMERS}", "sources": [source]}
        with atomic_folder(out) as folder:
            write_whole_files(model, folder, lineage, out.name, beside=self.opened.tokenizer_files())
            del model
            if (change := (OpenedDecoder(folder).load(dtype=self.dtype)(ids).logits - before).abs().max()) > 1e-4:
                what = f"the folder would not compute what its parts do: a logit changed by {change:g}"
                raise BraidError(what, str(out), "Nothing was written. Please report it: this is a mistake of Braid's.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _exporting_bridge(to: str, dtype: str | None) -> ExportingBridge:
    bridge = bridges[to]
    if to not in export_formats():
        raise BraidError(f"Braid reads {bridge.title} and does not write it; it writes {', '.join(export_formats())}")
    if dtype is None:
        return bridge()
    if not bridge.dtypes:
        raise BraidError(f"`--dtype` does not go with `--to {to}`", todo=f"{bridge.title} is written as float32.")
    if dtype not in bridge.dtypes:
        known = ", ".join(bridge.dtypes)
        raise BraidError(f"unknown dtype '{dtype}'.{did_you_mean(dtype, bridge.dtypes)}", todo=f"There are {known}.")
    return bridge(dtype)


def _check_out(out: str | Path | None, bridge: ExportingBridge | None) -> None:
    """Refuse an output that is not given or exists already, and a file with another suffix than the format's."""
    if bridge is None or bridge.suffix is None:
        check_new_folder(out)
        return
    if out is None:
        todo = f"Add `--out FILE{bridge.suffix}`, or `--dry-run` to see the plan only."
        raise BraidError("give the file to write", todo=todo)
    if given_path(out).suffix != bridge.suffix:
        raise BraidError(f"{bridge.title} is one file whose name ends with {bridge.suffix}", str(out))
    if given_path(out).exists():
        raise BraidError("this file exists already", str(out), "Choose another name or remove it first.")


def _format_of(folder: Path) -> str:
    """The format that a folder's config.json names."""
    kind, known = model_type(folder), ", ".join(folder_formats())
    if kind == BRAID:
        todo = f"Say what to make of it: `--to` one of {', '.join(export_formats())}."
        raise BraidError("this is a Braid model already", str(folder), todo)
    if kind not in folder_formats():
        todo = "If it is one of these under another name, say so with `--from`."
        raise BraidError(f"this folder holds a '{kind}' model; Braid reads {known}", str(folder), todo)
    return kind
