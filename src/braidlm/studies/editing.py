"""The models of a study that edits make: a folder that was made of the same models in the same way is used again."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.errors import BraidError, collecting
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.integrity import model_hash
from braidlm.core.models.runs import is_run, newest_checkpoint
from braidlm.edits.edit import edit
from braidlm.inspection.texts import DataSource
from braidlm.opening.open import open_model
from braidlm.studies.models import errors_of
from braidlm.studies.phases import EditStep, edit_step
from braidlm.studies.study import Study
from braidlm.training.features.distill.teachers import TEACHER


def apply_edits(
    start: Path, steps: Sequence[EditStep], outs: Sequence[Path], texts: Mapping[str, Path], seed: int, fresh: bool
) -> Path:
    """Edit a model step by step, each into its own folder; `texts` are the packed domains by name."""
    for step, out in zip(steps, outs, strict=True):
        start = _edited(start, step.kind, _options(step, texts), out, seed, fresh)
    return start


def check_texts(study: Study) -> None:
    """Refuse edits whose text is neither a domain nor something that can be read, before any work."""
    problems: list[str] = []
    for name, spec in study.variants.items():
        for at, written in enumerate(spec.edits):
            step = edit_step(written, f"variants.{name}.edits[{at}]")
            text = getattr(step.edit, "text", None)
            if text is not None and text not in study.domains:
                with collecting(problems), errors_of("variant", name):
                    DataSource(step.kind, text, 1).check()
    if problems:
        raise BraidError("\n".join(problems), todo="A text is a file, a folder, packed data, or a domain's name.")


def is_made_of(folder: Path, sources: Sequence[Path], options: Mapping[str, Any] | None = None) -> bool:
    """Whether a model folder's lineage names exactly the weights of these models, and these options of an edit."""
    lineage = load_lineage(folder) or {}
    before = [source for source in lineage.get("sources", []) if "data" not in source]
    same = [_weights(source) for source in before] == [
        _weights(open_model(source, "braid").record()) for source in sources
    ]
    return same and (options is None or options.items() <= lineage.get("options", {}).items())


def is_trained_from(run: Path, start: Path) -> bool:
    """Whether a run's newest checkpoint began with this model's weights."""
    newest = newest_checkpoint(run)
    return newest is not None and is_made_of(newest, [start])


def is_taught_by(run: Path, teachers: Sequence[Path]) -> bool:
    """Whether a run's newest checkpoint learned from these models as they are now."""
    newest = newest_checkpoint(run)
    sources = [] if newest is None else (load_lineage(newest) or {}).get("sources", [])
    before = [source["sha256"] for source in sources if source.get("role") == TEACHER]
    return before == [model_hash(teacher) for teacher in teachers]


def remove_made(folder: Path) -> None:
    """Remove a model folder that is to be made anew; a run in its place is somebody's training."""
    if is_run(folder):
        raise BraidError(
            "a run stands where an edited model should be: this variant was trained before, and is not any more",
            str(folder),
            "Remove the folder, or give the variant another name.",
        )
    shutil.rmtree(folder)


def _edited(start: Path, kind: str, options: dict[str, Any], out: Path, seed: int, fresh: bool) -> Path:
    if out.is_dir():
        lineage = load_lineage(out) or {}
        same = lineage.get("made_by") == f"braid edit {kind}" and is_made_of(out, [start], {"seed": seed, **options})
        if same and not fresh:
            return out
        remove_made(out)  # the model was trained again since, or the recipe changed
    console.say(f"\n{out.name}, seed {seed}: braid edit {kind}")
    with console.silence():  # its account of every tensor is in the lineage
        edit(kind, start, out, seed=seed, **options)
    return out


def _options(step: EditStep, texts: Mapping[str, Path]) -> dict[str, Any]:
    """An edit's options as its lineage has them; a text that is a domain's name stands for the packed domain."""
    options: Any = step.edit
    text = getattr(options, "text", None)
    if text is not None and text in texts:
        options = replace(options, text=str(texts[text]))
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return plain


def _weights(record: Mapping[str, Any]) -> Any:
    """What identifies the weights of a source: the hash of Braid's file, or those of another format."""
    return record.get("sha256") or record.get("weights")
