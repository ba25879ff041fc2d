"""What the numbers of a study with paths mean, in sentences that follow from them whatever they are."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from braidlm.studies.results import Bits, ModelResult, StudyResults
from braidlm.studies.tables import duration

EQUAL = 0.02
"""Two scores that differ by less than this share count as equal: another seed moves them as far."""
COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}


class Finding(NamedTuple):
    """An answer, and the question it answers."""

    question: str
    answer: str


def findings(results: StudyResults, composed: ModelResult, ngrams: Mapping[str, Bits]) -> list[Finding]:
    """What the owners of the paths get, what withdrawing a path costs, and what pooling all text would have given."""
    paths = [m for m in results.models if m.kind == "path" and m.seed == composed.seed]
    count = COUNTS.get(len(paths), str(len(paths)))
    kept = f"{results.study.kept:.0%} of their text" if results.study.kept is not None else "text"
    found = [
        Finding(f"{count} owners keep {kept} to themselves: what do they get?", _owners(composed, paths, ngrams)),
        Finding("What does it cost when one of them withdraws?", _withdrawal(composed)),
    ]
    dense = [m for m in results.models if m.kind == "whole" and m.seed == composed.seed]
    if dense:
        answer = " ".join(_dense(composed, paths, model) for model in dense)
        found.append(Finding("What would one model that saw all of the text reach?", answer))
    return found


def _owners(composed: ModelResult, paths: Sequence[ModelResult], ngrams: Mapping[str, Bits]) -> str:
    own = {path.name: path.bits[path.name] for path in paths}
    others = [path.bits[domain] for path in paths for domain in path.bits if domain != path.name]
    sentences = [
        "One model for every domain. In bits per byte of text that no model was trained on, it has "
        f"{_listed(composed.bits)}; the owners' own models have {_listed(own)}, each on its own domain, and "
        f"{_range(others)} on another's.",
        f"Beside them the composed model is {compared(composed.bits, own)}.",
    ]
    for name, bits in ngrams.items():
        sentences.append(
            f"A {name} model of all the text of a domain has {_listed(bits)}; beside the composed model it is "
            f"{compared(bits, composed.bits)}."
        )
    return " ".join(sentences)


def _withdrawal(composed: ModelResult) -> str:
    sentences = []
    for path, bits in composed.silenced.items():
        rest = {domain: bits[domain] - composed.bits[domain] for domain in bits if domain != path}
        costs = ", ".join(f"{_signed(cost)} bits per byte on {domain}" for domain, cost in rest.items())
        gone = bits[path] / composed.bits[path]
        effect = (
            f"and {path} goes from {composed.bits[path]:.2f} to {bits[path]:.2f}, so that most of it is gone"
            if gone > 2
            else f"and {path} goes from {composed.bits[path]:.2f} to {bits[path]:.2f}, so that much of it stays"
        )
        sentences.append(f"Without the path {path} the rest pays {costs}, {effect}.")
    sentences.append("Nothing is trained again for that, and it can be undone.")
    return " ".join(sentences)


def _dense(composed: ModelResult, paths: Sequence[ModelResult], dense: ModelResult) -> str:
    took = sum(path.seconds for path in paths) + composed.seconds
    return (
        f"The dense model of {dense.parameters:,} parameters (the composed one has {composed.parameters:,}), trained "
        f"on all domains pooled for {duration(dense.seconds)} (paths and composed model: {duration(took)}), has "
        f"{_listed(dense.bits)}. Beside the composed model it is {compared(dense.bits, composed.bits)}."
    )


def compared(bits: Bits, others: Bits) -> str:
    """How scores compare with others, domain by domain: `better on stories (by 12%) and equal on maths`."""
    words: dict[str, list[str]] = {"better": [], "equal": [], "worse": []}
    for domain in others:
        change = bits[domain] / others[domain] - 1
        if abs(change) < EQUAL:
            words["equal"].append(domain)
        else:
            words["better" if change < 0 else "worse"].append(f"{domain} (by {abs(change):.0%})")
    return ", ".join(f"{word} on {' and '.join(domains)}" for word, domains in words.items() if domains)


def _listed(bits: Mapping[str, float]) -> str:
    *first, last = [f"{value:.2f} on {domain}" for domain, value in bits.items()]
    return f"{', '.join(first)} and {last}" if first else last


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
