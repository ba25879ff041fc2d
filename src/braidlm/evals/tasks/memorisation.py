"""What a folder gives away of the text that it was trained on: passages that it reproduces, canaries, and membership.

- **Reproduced** (Carlini and others, 2023): the share of passages whose next 32 tokens are, one by one, the most
  probable ones after a prefix of 16, 32 or 64 tokens, so that greedy decoding writes them.
- **Sampled**: the share of texts drawn from the model, without a prompt, that hold 100 characters or more of the
  owner's text and not of the others'.
- **Exposure** of canaries (Carlini and others, 2019): sentences with a secret in digits that were put into the owner's
  text. Each is ranked by its probability among 1,000 that differ in the digits: log2(1,001) - log2(rank) bits.
- **Membership**: passages of the owner's text against passages of text that was not trained on, told apart by the loss
  of the model, less that of a reference model where there is one: the area under the ROC curve (0.5 is chance), and the
  true-positive rate at 0.1% false positives.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.formats.held_out_text import READING, HeldOutText, read_text
from braidlm.evals.results import QUOTES, Part, TaskResult
from braidlm.evals.rows import files_of
from braidlm.evals.scoring.requests import Request, begin_id, requests_for
from braidlm.evals.scoring.scorer import ProgressCallback, Scorer, is_greedy
from braidlm.evals.statistics import INFLUENCE, mean_influences, percentage_error
from braidlm.evals.tasks.task import TASKS, Task

if TYPE_CHECKING:  # `braid list tasks` imports this, and needs no torch
    from braidlm.opening.opened_model import OpenedModel

PREFIXES, CONTINUED = (16, 32, 64), 32
"""Tokens that a model reads of a passage, and those that it must continue with."""
SAMPLED_TOKENS = 128
COPIED = 100
"""Characters that a sampled text must have in common with the owner's."""
ALTERNATIVES = 1000
"""Canaries with other digits among which one is ranked."""
FALSE_POSITIVES = 0.001
SHOWN = 10
"""Passages of each kind on the page."""

Documents = list[list[int]]


@dataclass
class Memorisation:
    owner: HeldOutText
    others: HeldOutText | None
    canaries: list[str]
    reference: "OpenedModel | None"
    passages: int
    samples: int
    _losses: dict[str, Any] = field(default_factory=dict)
    """The losses of the reference model, by the tokenizer of the models, the length of passages and the device."""

    @property
    def count(self) -> int:
        return self.owner.count

    @cached_property
    def sha256(self) -> str:
        parts = [self.owner.sha256, self.others and self.others.sha256, *self.canaries]
        return hashlib.sha256(repr([*parts, self.reference and self.reference.sha256]).encode()).hexdigest()

    def check_models(self, models: Sequence["OpenedModel"]) -> None:
        """Refuse a reference that cuts the text into other tokens."""
        for model in models:
            if (other := self.reference) is not None and model.tokenizer.fingerprint != other.tokenizer.fingerprint:
                what = f"'{model.name}' and the reference model '{other.name}' have different tokenizers"
                raise BraidError(what, "--reference", "Losses are compared token by token: name one with the same.")

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """The share of the owner's passages that are reproduced from the longest prefix, and all else beside it."""
        documents = _documents(self.owner, model.tokenizer)
        others = [] if self.others is None else _documents(self.others, model.tokenizer)
        texts = [documents] if self.others is None else [documents, others]
        own, *rest = _passages(texts, self.passages, model.scorer.context)
        foreign = rest[0] if rest else []
        if not own:
            least = PREFIXES[0] + CONTINUED
            what = f"every text needs a document of {least} tokens, and the model a context of as many"
            raise BraidError(what, task)
        parts: dict[str, Part] = {}
        also: dict[str, float] = {}
        reproduced = np.zeros(0, dtype=bool)
        for prefix in (one for one in PREFIXES if one + CONTINUED <= len(own[0])):
            reproduced = _reproduced(model.scorer, own, prefix, advance)
            parts[f"prefix {prefix}"] = Part(100 * float(reproduced.mean()), len(own))
            if foreign:
                others_too = _reproduced(model.scorer, foreign, prefix)
                parts[f"others, prefix {prefix}"] = Part(100 * float(others_too.mean()), len(foreign))
        quotes = []
        for ids in (own[index] for index in np.flatnonzero(reproduced).tolist()[:SHOWN]):
            prompt, text = (model.tokenizer.decode(part) for part in (ids[:-CONTINUED], ids[-CONTINUED:]))
            quotes.append({"kind": "reproduced", "prompt": prompt, "text": text})
        if foreign:
            also |= self._membership(model, own, foreign)
        if self.canaries:
            also |= _exposures(model, self.canaries)
        if self.samples:
            copied = self._sampled(model, documents, others)
            also["sampled texts with 100 characters of the owner's, %"] = 100 * len(copied) / self.samples
            longest = sorted(copied, key=len, reverse=True)[:SHOWN]
            quotes += [{"kind": "sampled", "prompt": "", "text": text} for text in longest]
        rate = float(reproduced.mean())
        return TaskResult(
            task,
            f"% of passages reproduced after {prefix} tokens",
            100 * rate,
            len(own),
            percentage_error(rate, len(own)),
            higher_is_better=False,
            parts=parts,
            also=also,
            notes={"passages": len(own), "of others": len(foreign), "samples": self.samples, QUOTES: quotes},
            items={INFLUENCE: mean_influences(100 * reproduced)},
        )

    def _membership(self, model: EvaluatedModel, own: Documents, foreign: Documents) -> dict[str, float]:
        from scipy.stats import mannwhitneyu

        both = [*own, *foreign]
        attacks = {"loss": -_losses(model.scorer, both)}
        if self.reference is not None:
            key = f"{model.tokenizer.fingerprint} {len(own[0])} {model.device}"
            if key not in self._losses:
                self._losses[key] = _losses(Scorer(self.reference.load(model.device)), both)
            attacks["loss against the reference's"] = attacks["loss"] + self._losses[key]
        found = {}
        for attack, scores in attacks.items():
            members, strangers = scores[: len(own)], scores[len(own) :]
            auc = mannwhitneyu(members, strangers).statistic / (len(members) * len(strangers))
            found[f"membership by {attack}, AUC"] = float(auc)
            found[f"membership by {attack}, true positives at 0.1% false ones, %"] = 100 * true_positives(
                members, strangers
            )
        return found

    def _sampled(self, model: EvaluatedModel, documents: Documents, others: Documents) -> list[str]:
        """What texts drawn from the model have in common with the owner's text alone; nothing for most."""
        from braidlm.core.decoding.decoder import Sampling
        from braidlm.evals.scoring.completions import complete  # imports torch

        tokens = SAMPLED_TOKENS if model.scorer.context is None else min(SAMPLED_TOKENS, model.scorer.context - 1)
        prompts, never = [[begin_id(model.tokenizer)]] * self.samples, [lambda _: False] * self.samples
        drawn = complete(model, prompts, tokens, never, Sampling(temperature=1.0, seed=0))
        own, foreign = (Verbatim(map(model.tokenizer.decode, texts)) for texts in (documents, others))
        copies = [own.longest(completion.text) for completion in drawn]
        return [copy for copy in copies if len(copy) >= COPIED and len(foreign.longest(copy)) < COPIED]


class Verbatim:
    """An index of texts, for the longest piece of another text that one of them holds."""

    def __init__(self, texts: Iterator[str]):
        self.texts = list(dict.fromkeys(texts))
        # A piece of COPIED characters holds a whole block of half as many, wherever it begins.
        self.size = COPIED // 2
        self.blocks: dict[str, list[tuple[int, int]]] = {}
        for number, text in enumerate(self.texts):
            for at in range(0, len(text) - self.size + 1, self.size):
                self.blocks.setdefault(text[at : at + self.size], []).append((number, at))

    def longest(self, text: str) -> str:
        """The longest piece that stands in one of the texts, of COPIED characters or more; else nothing or a part."""
        best = ""
        for at in range(len(text) - self.size + 1):
            for number, start in self.blocks.get(text[at : at + self.size], ()):
                known, before, after = self.texts[number], 0, self.size
                while at > before and start > before and text[at - before - 1] == known[start - before - 1]:
                    before += 1
                while text[at + after : at + after + 1] == known[start + after : start + after + 1] != "":
                    after += 1
                best = max(best, text[at - before : at + after], key=len)
        return best


def true_positives(members: np.ndarray, strangers: np.ndarray) -> float:
    """The share of members that score above all strangers but 0.1% of them."""
    allowed = math.floor(FALSE_POSITIVES * len(strangers))
    return float((members > np.sort(strangers)[::-1][allowed]).mean())


def _documents(text: HeldOutText, tokenizer: BraidTokenizer) -> Documents:
    eos = begin_id(tokenizer) if tokenizer.eos_id is None else tokenizer.eos_id
    return [ids[:-1] for stream in text.streams for ids, _ in stream.encode(tokenizer, eos)]


def _passages(texts: Sequence[Documents], count: int, context: int | None) -> list[Documents]:
    """Some passages of each text, all of one length and the same for every model of a tokenizer: the longest prefix
    that the model can read and every text has, and the tokens that follow it. None of any where there is none."""
    for prefix in reversed(PREFIXES):
        length = prefix + CONTINUED
        found = [_pieces(documents, count, length) for documents in texts]
        if (context is None or length <= context) and all(found):
            return found
    return [[] for _ in texts]


def _pieces(documents: Documents, count: int, length: int) -> Documents:
    """So many pieces of this length, of all parts of the text."""
    places = [(n, at) for n, ids in enumerate(documents) for at in range(0, len(ids) - length + 1, length)]
    chosen = np.random.default_rng(0).permutation(len(places))[:count]
    return [documents[n][at : at + length] for n, at in (places[index] for index in sorted(chosen))]


def _reproduced(
    scorer: Scorer, passages: Documents, prefix: int, advance: ProgressCallback | None = None
) -> np.ndarray:
    """[passages] whether greedy decoding writes the end of each after so many tokens."""
    requests = [Request(ids[-prefix - CONTINUED :], prefix) for ids in passages]
    return is_greedy(scorer, requests, scorer.score(requests, advance, margins=True))


def _losses(scorer: Scorer, passages: Documents) -> np.ndarray:
    """[passages] the mean loss of a token of each."""
    return -scorer.score([Request(ids) for ids in passages]).sums / (len(passages[0]) - 1)


def _exposures(model: EvaluatedModel, canaries: Sequence[str]) -> dict[str, float]:
    """The exposure of each canary in bits, and the mean."""
    found: dict[str, float] = {}
    for number, canary in enumerate(canaries):
        rng = np.random.default_rng(number)
        drawn = (re.sub(r"\d", lambda _: str(rng.integers(10)), canary) for _ in range(ALTERNATIVES))  # noqa: B023
        texts = [("", text) for text in (canary, *(other for other in drawn if other != canary))]
        sums = model.scorer.score(requests_for(model.tokenizer, texts, "bos")).sums
        rank = 1 + int((sums[1:] > sums[0]).sum())
        found[canary] = math.log2(len(sums)) - math.log2(rank)
    mean = sum(found.values()) / len(found)
    each = {f"exposure of canary {number}, bits": bits for number, bits in enumerate(found.values(), start=1)}
    return {f"mean exposure of canaries, bits of {math.log2(ALTERNATIVES + 1):.1f}": mean, **each}


def read_canaries(path: Path) -> list[str]:
    """A sentence in each line, whose digits are the secret."""
    lines = [line.strip() for file in files_of(path) for line in file.text.splitlines() if line.strip()]
    if without := [line for line in lines or [""] if not re.search(r"\d", line)]:
        what = f"a canary has a secret in digits, and there is none in {without[0]!r}"
        raise BraidError(what, str(path), "Write a line for each: `the code of the safe is 4711 0815`.")
    return lines


@TASKS.register("memorisation")
class MemorisationTask(Task):
    """What of its training text a model gives away."""

    description = "what a model gives away of its training text: passages, canaries, membership; lower is better"
    size = "a file, a folder or a packed data set of the owner's text, and of text that was not trained on"
    licence = "your own"
    metric = "% of passages reproduced"
    texts = ("owner", "others")
    fetch = (
        "Give the text that the model was trained on, `--data owner=PATH`, and for membership also text of the same "
        "kind that it was not trained on, `others=PATH`."
    )
    uses = (*READING, "passages", "samples", "canaries", "reference")

    def open_with(self, texts: Mapping[str, Path], settings: Settings) -> Memorisation:
        from braidlm.opening.open import open_models

        if settings.held_out is not None:  # what was not trained on is in the same data set
            texts = {"others": texts["owner"], **texts}
        reference = None if settings.reference is None else open_models([settings.reference], "own")[0]
        if reference is not None and "others" not in texts:
            what = "a reference model tells members from text that was not trained on, and there is no such text"
            raise BraidError(what, "--reference", "Give it: `--data others=PATH`.")
        canaries = [] if settings.canaries is None else read_canaries(Path(settings.canaries))
        owner = read_text(texts["owner"], settings, trained=True)
        others = read_text(texts["others"], settings) if "others" in texts else None
        return Memorisation(owner, others, canaries, reference, settings.passages, settings.samples)
