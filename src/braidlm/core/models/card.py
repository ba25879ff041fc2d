"""The model card (README.md) of a model folder: what it is made of, where it came from, its licence, how to use it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from braidlm.core.console import count
from braidlm.core.devices import weights_bytes
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, stage_table
from braidlm.core.reading import parse_yaml, read_text
from braidlm.core.report.rendering import part_markdown
from braidlm.core.report.report import Table
from braidlm.model.compression import untrainable
from braidlm.model.gates import Gate
from braidlm.model.language_model import LanguageModel
from braidlm.model.paths.switches import module_routers, path_names

CARD = "README.md"
FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
"""What the Hub reads at the beginning of a card."""


def licence_of_folder(folder: Path) -> str | None:
    """The licence that the card of a model folder states, Braid's or another's; a file of weights has no card."""
    try:
        licence = read_card(folder)[0].get("license")
    except BraidError:  # a card is for people: one that cannot be read keeps no model from being used
        return None
    return licence if isinstance(licence, str) and licence else None


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    """What the card of a model folder tells the Hub, and its text after that; a folder may have none."""
    text = read_text(folder / CARD) if (folder / CARD).is_file() else ""
    match = FRONT_MATTER.match(text)
    return (parse_yaml(match[1], str(folder / CARD)), text[match.end() :]) if match else ({}, text)


def written_card(told: Mapping[str, Any], text: str) -> str:
    """A card of what it tells the Hub, and its text."""
    lines = []
    for key, value in told.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines.append(yaml.safe_dump({key: json.loads(json.dumps(value, default=str))}, sort_keys=False).rstrip())
        else:  # JSON is YAML, and no text in it can end the front matter
            is_word = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) and yaml.safe_load(value) == value
            lines.append(f"{key}: {value if is_word else json.dumps(value, default=str)}")
    return "\n".join(["---", *lines, "---", "", text.lstrip()])


def model_index(name: str, results: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of one model by task, and what the tasks are, as `results.json` has them, in the Hub's form."""
    entries = []
    for task, result in results.items():
        about = tasks.get(task) or {}
        metric = " ".join(str(result.get("metric", "score")).split())
        count = {"items": result["count"]} if isinstance(result.get("count"), int) else {}
        error = result.get("standard_error")
        error = {"standard_error": round(error, 6)} if isinstance(error, float) else {}
        dataset: dict[str, Any] = {"type": task, "name": " ".join(str(about.get("description", task)).split())}
        versions = {"version": about.get("version"), "sha256": about.get("sha256")}
        dataset |= {"args": known} if (known := {k: v for k, v in versions.items() if v is not None}) else {}
        score = {"type": metric.lower().replace(" ", "_"), "value": round(float(result["score"]), 6), "name": metric}
        metrics = [score | ({"args": count | error} if count or error else {})]
        told = {"type": "text-generation", "name": "Text generation"}
        entries.append({"task": told, "dataset": dataset, "metrics": metrics})
    return [{"name": name, "results": entries}]


def licence_record(folder: Path) -> dict[str, str]:
    """The licence of a source, for the lineage of what is made of it."""
    licence = licence_of_folder(folder)
    return {"licence": licence} if licence else {}


def licence_of(lineage: dict[str, Any]) -> str | None:
    """The licence that a lineage states, or else the one that all models it was made of have."""
    own = lineage.get("licence")
    if isinstance(own, str) and own:
        return own
    inherited = set(source_licences(lineage).values())
    return inherited.pop() if len(inherited) == 1 else None


def source_licences(lineage: dict[str, Any]) -> dict[str, str | None]:
    """The licence of each model that this one was made of, by its name."""
    licences: dict[str, str | None] = {}
    for number, source in enumerate((one for one in _sources(lineage) if "data" not in one), 1):
        name = next((source[key] for key in ("name", "model", "path") if source.get(key)), number)
        licence = source.get("licence")
        licences[str(name)] = licence if isinstance(licence, str) else None
    return licences


def _sources(lineage: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a model was made of, as far as its lineage, which may be a stranger's, says it in objects."""
    sources = lineage.get("sources")
    return [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []


NO_LICENCE = "Not stated. (In a recipe, `licence: apache-2.0` states it.)"
HUB = "hub:"
"""How a recipe writes a data set of the Hub."""
HUB_MODEL = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{40}")
"""How a lineage writes a model of the Hub, with its revision."""
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
text = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```"""
USE_AS_IT_IS = USE.replace(", trust_remote_code=True", "")
"""How a folder is used that needs no code of its own."""
ADAPTERS = """## Adapters
Paths and experts of one shape are one parameter, [member, in, out], which PEFT's `all-linear` does not see. Name these
parameters beside it:

```python
from peft import LoraConfig, get_peft_model

stacks = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
config = LoraConfig(target_modules="all-linear", target_parameters=stacks, task_type="CAUSAL_LM")
model = get_peft_model(model, config)
```"""


def results_section(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results of one model by task, for people."""
    rows = []
    for task, result in results.items():
        error = result.get("standard_error")
        shown = f"{result['score']:.4g}" + (f" ± {error:.2g}" if isinstance(error, float) else "")
        rows.append((task, result.get("metric", "score"), shown, result.get("count", "-")))
    return f"## Evaluation\n\n{part_markdown(Table(('task', 'metric', 'score', 'items'), rows))}\n"


def model_card(name: str, lineage: dict[str, Any], model: LanguageModel | None = None, use: str = "") -> str:
    """The whole page; without a `model`, that of a folder of another format: `use` says how it is used."""
    options = lineage.get("options")
    chosen = ", ".join(_options(options)) if isinstance(options, dict) else ""
    made_by = f"{lineage.get('made_by', 'unknown')}{f' ({chosen})' if chosen else ''}"
    sections = [f"# {_title(name, lineage)}", f"Made with Braid (the Python package `braidlm`): {made_by}."]
    if models := list(_model_rows(lineage)):
        sections += ["## Made of", part_markdown(Table(("model", "made by"), models))]
    if model is not None:
        parts = part_markdown(Table(("part", "layers", "parameters", "active per token"), list(_parts(model))))
        sections += [part_markdown(Table(("", ""), _facts(model))), USE, "## Parts", parts]
        has_stacks = any(parameter.ndim == 3 for parameter in model.parameters())
        if has_stacks and not untrainable(model.config.decoded.compression):
            sections.append(ADAPTERS)
        sections += switch_section(model)
    if scores := list(_score_rows(lineage)):
        sections += ["## Scores", part_markdown(Table(("", "before", "after"), scores))]
    rows = list(_data_rows(lineage))
    data = part_markdown(Table(("data", "source", "tokens", "words", "for"), rows)) if rows else "Not known."
    sections += ["## Data", data, "## Licence", _licence_section(lineage)]
    sections.append("`lineage.json` says where every part came from.")
    if training := lineage.get("training"):
        sections.append(f"Training so far:\n\n```json\n{json.dumps(training, indent=2)}\n```")
    sections += [f"## Use\n{use}"] if use else []
    return written_card(front_matter(lineage), "\n\n".join(sections) + "\n")


def _title(name: str, lineage: Mapping[str, Any]) -> str:
    """The name of a model: of a run's checkpoint, whose folder is a number of steps, that of its recipe."""
    recipe = lineage.get("recipe")
    named = recipe.get("name") if isinstance(recipe, dict) and re.fullmatch(r"step-\d+", name) else None
    return f"{named}, {name}" if isinstance(named, str) and named else name


def _options(options: Mapping[str, Any]) -> Iterator[str]:
    """The options of an edit that were given, but for paths of a machine."""
    for key, value in options.items():
        if key != "seed" and value not in (None, (), []) and not ("/" in str(value) or "\\" in str(value)):
            if isinstance(value, Mapping):  # as a user writes a join
                given = {name: own for name, own in value.items() if own is not None}
                pairs = ", ".join(f"{name}: {own}" for name, own in given.items())
                value = given["kind"] if given.keys() == {"kind"} else f"{{{pairs}}}"
            yield f"{key} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


def _model_rows(lineage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The models that a model was made of, each with how it was made or its format."""
    for source in _sources(lineage):
        if "data" in source:
            continue
        before: Any = source.get("lineage") if isinstance(source.get("lineage"), dict) else {}
        known = source.get("model") or source.get("path") or "-"
        name = source.get("name")
        title = Path(str(known)).name if not HUB_MODEL.fullmatch(str(known)) else str(known)
        title = title if name in (None, "model", title) else f"{name}: {title}"
        yield title, str(source.get("made_by") or before.get("made_by") or source.get("format") or "-")


SCORES: dict[str, tuple[str, str]] = {
    "bits_per_byte": ("bits per byte of a text", ".4f"),
    "perplexity": ("perplexity of a text", ".4g"),
    "weights_bytes": ("bytes of weights", ",d"),
}
"""What edits measure before and after, in words and with the form of its numbers."""


def _score_rows(lineage: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is known of a model's quality: at the end of its training, or before and after an edit."""
    training, measured = lineage.get("training"), lineage.get("measured")
    if isinstance(training, dict) and isinstance(bits := training.get("bits_per_byte"), float):
        yield "bits per byte of its training text", "-", f"{bits:.4f}"
    before, after = (measured.get(time) if isinstance(measured, dict) else None for time in ("before", "after"))
    if isinstance(before, dict) and isinstance(after, dict):
        for key, (label, form) in SCORES.items():
            known = [isinstance(one.get(key), (int, float)) for one in (before, after)]
            if all(known):
                yield label, format(before[key], form), format(after[key], form)


def switch_section(model: nn.Module) -> list[str]:
    """How to switch parts of a model off: paths, modules of routers, gates."""
    lines = []
    if paths := path_names(model):
        lines.append(
            f"model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, paths={[paths[0]]})"
        )
    if modules := next((router.choices for router in module_routers(model)), None):
        lines += [f"model.switch_off({modules[0]!r})  # in all layers", "model.switch_off()  # all are on again"]
    if gate := next((address for address, module in model.named_modules() if isinstance(module, Gate)), None):
        lines.append(f"model.get_submodule({gate!r}).is_off = True  # this gate adds nothing")
    return ["## Switch parts off", "\n".join(["```python", *lines, "```"])] if lines else []


def _licence_section(lineage: dict[str, Any]) -> str:
    if own := lineage.get("licence"):
        return str(own)
    if inherited := licence_of(lineage):
        return f"{inherited}, which is the licence of what it was made of."
    sources = source_licences(lineage)
    listed = "; ".join(f"{name}: {licence or 'not stated'}" for name, licence in sources.items())
    return f"{NO_LICENCE}\n\nWhat it was made of: {listed}." if any(sources.values()) else NO_LICENCE


def front_matter(lineage: dict[str, Any]) -> dict[str, Any]:
    """What the Hub is told of a model: its kind, licence, data sets and base models."""
    told: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["braid"]}
    if licence := licence_of(lineage):
        told["license"] = licence
    on_hub = [row[1].removeprefix(HUB) for row in _data_rows(lineage) if row[1].startswith(HUB)]
    if names := dict.fromkeys(source.split(":")[0].split("@")[0] for source in on_hub):
        told["datasets"] = list(names)
    if bases := dict.fromkeys(_hub_models(lineage)):
        told["base_model"] = list(bases)
    return told


def _hub_models(lineage: Any) -> Iterator[str]:
    if not isinstance(lineage, dict):
        return
    if match := HUB_MODEL.fullmatch(str(lineage.get("model"))):
        yield match[1]
    for inner in (lineage.get("base"), lineage.get("lineage"), *_sources(lineage)):
        yield from _hub_models(inner)


def _facts(model: LanguageModel) -> list[tuple[str, Any]]:
    cost, architecture = model_cost(model), model.config.decoded
    forms = ", ".join(choice.kind for choice in architecture.compression)
    return [
        ("parameters", f"{cost.parameters:,}"),
        *([("compression", f"{forms}: {weights_bytes(model):,} bytes of weights")] if forms else []),
        ("active per token", f"{cost.active_parameters:,}"),
        ("forward FLOPs per token", f"{count(float(cost.flops_per_token))} at {architecture.context} tokens"),
        ("width", architecture.width),
        ("stages", ", ".join(f"{s.kind} x {getattr(s.options, 'layers', 1)}" for s in architecture.stages)),
        ("vocabulary", model.config.vocab_size),
        ("context", architecture.context),
    ]


def _parts(model: LanguageModel) -> Iterator[tuple[Any, ...]]:
    for row in stage_table(model):
        paths = f" of {', '.join(row['paths'])} ({row['join']})" if "paths" in row else ""
        paths += f", shared: {row['shared']}" if "shared" in row else ""
        paths += f", settles after {row['settles']} tokens" if "settles" in row else ""
        yield f"{row['name']}{paths}", row["layers"] or "-", f"{row['parameters']:,}", f"{row['active_parameters']:,}"


def _data_rows(lineage: dict[str, Any], part: str = "-") -> Iterator[tuple[str, str, str, str, str]]:
    """The data that a model was trained on, and its sources before it: the last column is the path or model."""
    sets = ((lineage.get("recipe") or {}).get("data") or {}).get("sets") or {}
    for source in _sources(lineage):
        if "data" in source:
            own = sets.get(source["data"]) or {}
            found = next((own[key] for key in ("source", "folder", "path") if own.get(key)), "-")
            where = ", ".join(map(str, found if isinstance(found, list) else [found]))
            amounts = (source.get("tokens"), source.get("words"))
            tokens, words = (f"{amount:,}" if isinstance(amount, int) else "-" for amount in amounts)
            yield str(source["data"]), where, tokens, words, part
        elif source.get("sources"):
            yield from _data_rows(source, str(source.get("name") or source.get("model") or part))
        elif isinstance(source.get("lineage"), dict):  # the same model in another format
            yield from _data_rows(source["lineage"], part)
