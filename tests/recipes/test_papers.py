"""Every recipe of the papers and of owners runs: at toy size on a CPU, each kind of step in it.

What differs in numbers, texts and the names of domains alone runs once, in the recipe that has most steps.
"""

import functools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.recipes import compose_recipe, is_study, list_recipes
from braidlm.studies.decoding import decode_study
from braidlm.studies.running import run_study
from braidlm.training.train import train
from tests.recipes.toy import STEPS, VOCABULARY, kind, toy, with_what_they_read, words
from tests.tiny_decoders import save_decoder

WHOLE = {f"papers/papaformer/{name}" for name in ("owners", "spoken-and-written", "stories-and-maths")}
"""Studies that tests/recipes/test_papaformer_again.py runs whole."""
BASELINE = "papers/stlm/techniques/baseline"
TAUGHT = "papers/stlm/techniques/distilled"
DECODER = "papers/self-moe/orca-math"
NAMES = [name for name, _ in list_recipes() if name.startswith(("papers/", "owners/")) and name not in WHOLE]


@functools.cache
def toy_forms() -> dict[str, dict[str, Any]]:
    """Of each recipe what no other does: {its name: its toy form}, the longest first."""
    forms = {name: toy(compose_recipe(name), Path("FOLDER")) for name in NAMES}
    found, done = {}, set()
    for name in sorted(forms, key=lambda name: -len(forms[name].get("steps", ()))):
        form = forms[name]
        steps = form.get("steps")
        new = {kind(form, step): step for step in steps} if steps else {json.dumps(words(form | {"name": ""})): ""}
        wanted = [step for what, step in new.items() if what not in done]
        done |= new.keys()
        if wanted:
            found[name] = form | ({"steps": with_what_they_read(steps, wanted)} if steps else {})
    assert {TAUGHT, DECODER, BASELINE} <= found.keys()
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def placed(name: str, out: Path, cache: str) -> dict[str, Any]:
    data = deepcopy(toy_forms()[name])
    data["data"]["cache"] = cache
    return data | {"name": "toy", "out": str(out)}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (TAUGHT, DECODER, BASELINE)])
def test_what_no_other_recipe_does_runs(name: str, tmp_path: Path, cache: str) -> None:
    if name not in toy_forms():
        return
    if not is_study(toy_forms()[name]):
        run(name, tmp_path / "out", cache)
        return
    data = placed(name, tmp_path / "out", cache)
    models = run_study(decode_study(data), device="cpu")
    assert {model.name for model in models} == set(data["steps"])
    assert all(model.run is None or model.run.progress.steps == int(STEPS.split()[0]) for model in models)


def run(name: str, out: Path, cache: str, **training: Any) -> Path:
    """The run folder of a recipe of one training."""
    data = placed(name, out, cache)
    data["training"] |= training
    done = train(data, device="cpu")
    assert done.progress.steps == int(STEPS.split()[0])
    return done.folder


def test_the_baseline_and_what_it_teaches(tmp_path: Path, cache: str) -> None:
    teacher = run(BASELINE, tmp_path / "teacher", cache)
    distill = toy_forms()[TAUGHT]["training"]["distill"] | {"teachers": [str(teacher)]}
    run(TAUGHT, tmp_path / "out", cache, distill=distill)


def test_a_pretrained_decoder(tmp_path: Path, cache: str) -> None:
    """A tiny Llama in place of one of 7B."""
    data = placed(DECODER, tmp_path / "out", cache)
    tokenizer = next(Path(cache).glob("tokenizer-*/tokenizer.json"))
    data["decoder"] = str(save_decoder("llama", tokenizer, tmp_path / "decoder", vocab_size=VOCABULARY))
    del data["data"]["tokenizer"]
    assert train(data, device="cpu").finished
