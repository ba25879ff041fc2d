"""Every verb, option, key, part, edit, task and recipe of version 0.1.0 is there today, or its absence is explained."""

import re
from pathlib import Path

from tests.docs.reference_names import names_of

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).with_name("reference-0.1.0.txt")
STEPS = "a study is a graph of `steps` of five kinds, and the error for an old key says what to write now"
GONE: dict[str, str] = {
    r"Study keys > The top of a study > (averages|composed|distilled|paths|variants|whole)": STEPS,
    r"Study keys > (averages|composed|distilled|variants|whole)\.NAME( > .*)?": STEPS,
    r"Study keys > paths( > .*)?": STEPS,
}
"""Patterns of names that version 0.1.0 had, with why they are gone and what is written now."""
NEW: dict[str, str] = {
    "(list data|Data) > csv": "tables as text, by column",
    r".*(duplicates|quality|chunk.tokens)( .*)?": "filters, the split by chunks: off by default",
    r"list tasks > triviaqa": "TriviaQA, as in ModuleFormer's Table 2",
    r".*cache_gb": "data sets in shards at addresses come into a cache of bounded size",
    r"Study keys > The top of a study > (steps|models|kept)": STEPS,
    r"Study keys > steps\.NAME.*": STEPS,
    r"(Recipes|list recipes) > papers/moduleformer/languages": "the bases of Tables 4 and 5, modular and dense",
    r"Recipe keys > training\.lora > embedding": "LoRA with a trained embedding, as in ModuleFormer's Table 4",
    r"Recipe keys > training( > |\.)parallel.*": "how several processes share the weights",
    r"list tasks > bmlama53_of_3": "mLAMA with three options, as ModuleFormer asks it",
    r"Verbs > braid show > --(gpus?|per-machine|within|between|utilisation)": "plans of trainings on many GPUs",
    r"Verbs > braid (train|eval|prepare) > --cluster": "jobs on the nodes of a Ray cluster",
    r".*edit > prune > (--)?(heads|channels|layers)": "structured pruning of dense models",
    r"edit > select > --before": "every gate before a layer goes, as in Self-MoE's Table 6",
    r"(Recipes|list recipes) > papers/.*/(table[17]|compressed|selection|code|balance|thresholds|base-as-printed)": "a "
    "recipe for every table of the papers that needs no new mechanism",
    r"(Recipes|list recipes) > papers/moduleformer/(molm-4b-k2|pruning)": "the 4B model itself; three tables, one base",
    r"Verbs > braid push.*": "models go to the Hub with card, licence and results",
    r"Parts > projection.*": "experts of a projection are parts, so that another kind is one file; recipes stay",
    r"Verbs > braid compare > --text": "models of any kind, by size, speed and quality",
    r".* > --verbose": "edits say a summary; this shows where each tensor comes from",
    r"(Recipes|list recipes) > tiny/owners-modules": "modules of several owners on one base",
    r"edit > insert > --(text|beside|tokens|start)": "rows that begin as a domain's embedding, modules as copies",
    r"(edit > insert > --top-k|Parts > join > routed > base_top_k)": "one of the base's modules beside a new one",
    r"Parts > head > posterior > settle": "one model goes on alone after the beginning of a text",
    r"(Recipes|list recipes) > owners/.*": "every way that two owners have, on three pairs of text",
    r"(Recipes|list recipes) > best/strict-small-cpu": "the best recipe at the size of a laptop",
    r".*(memorisation|passages|samples|canaries|--reference|> reference)( .*)?": "what a model gives away of its text",
    r"Recipe keys > training( > |\.)privacy.*": "differential privacy",
    r"(Recipe keys|Parts > optimizer) > .*groups.*": "rates and decays of some parameters",
    r"(list recipes|Recipes) > best/record": "what else might gain on best/strict-small",
    r"Recipe keys > training( > |\.)token_dropout.*": "tokens that are read are replaced, against overfitting",
    "Parts > chunking > single": "every document is a row, for which differential privacy then is",
    r"edit > withdraw > --modules": "an owner's modules leave for good",
    r"Verbs > braid chat.*": "a conversation in the terminal",
    r".* > (--max-bytes|max_bytes)": "the same stretch of text for models of several tokenizers",
    r"Verbs > braid serve.*": "OpenAI's API for programs and a page for people",
}
"""Patterns of names that came since, with what they are for."""


def unexplained(names: set[str], explained: dict[str, str]) -> list[str]:
    return sorted(name for name in names if not any(re.fullmatch(pattern, name) for pattern in explained))


def test_nothing_that_users_write_is_lost_without_a_word() -> None:
    before, today = set(OLD.read_text(encoding="utf-8").splitlines()), set(names_of(ROOT / "docs" / "reference.md"))
    assert not unexplained(before - today, GONE)
    assert not unexplained(today - before, NEW)
    assert all(any(re.fullmatch(pattern, name) for name in before - today) for pattern in GONE), "it is back"
    assert all(any(re.fullmatch(pattern, name) for name in today - before) for pattern in NEW), "it is gone again"
