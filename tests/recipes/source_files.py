"""Short texts in place of the files that a study reads."""

import json
from pathlib import Path

from braidlm.core.recipes import compose_recipe
from braidlm.data.corpora.builtin import documents


def write_sources(recipe: str, folder: Path) -> list[str]:
    """A text for every file of the recipe's domains, another for each; returns the overrides that name them."""
    changes = []
    for at, (name, spec) in enumerate(compose_recipe(recipe)["domains"].items()):
        for key, first, count in (("source", 0, 60), ("validation", 1000, 120)):
            named = spec[key] if isinstance(spec[key], list) else [spec[key]]
            files = [folder / name / key / Path(file).name for file in named]
            for number, file in enumerate(files):
                file.parent.mkdir(parents=True, exist_ok=True)
                texts = documents("maths" if at % 2 else "stories", 1, first + 200 * at + 100 * number, count)
                file.write_text(_written(list(texts), file.suffix, spec))
            changes.append(f"domains.{name}.{key}=[{','.join(map(str, files))}]")
    return changes


def _written(texts: list[str], suffix: str, spec: dict[str, object]) -> str:
    if suffix == ".jsonl":
        fields = spec["fields"]
        assert isinstance(fields, list)
        return "\n".join(json.dumps(dict.fromkeys(fields, text)) for text in texts)
    separator = spec.get("separator")
    return (separator if separator == "<|endoftext|>" else "\n\n").join(texts)
