"""The texts to look at, as a model's own tokens: prompts, and the documents of data sets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braidlm.core.decoding.generation import encode_prompts
from braidlm.core.decoding.prompts import Prompt
from braidlm.core.errors import BraidError
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.packed import PackedData, is_packed
from braidlm.data.sources import Reading, documents, plan
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences


@dataclass(frozen=True)
class Text:
    """One prompt or document."""

    name: str
    domain: str | None
    ids: Sequence[int]


@dataclass(frozen=True)
class Texts:
    """Everything one model is shown."""

    prompts: list[Text]
    data: dict[str, list[Text]]
    """The documents of each data set."""

    @property
    def all(self) -> list[Text]:
        return [*self.prompts, *(text for texts in self.data.values() for text in texts)]


@dataclass(frozen=True)
class DataSource:
    """A data set by name: a packed folder, or text that the model's tokenizer makes into tokens."""

    name: str
    place: str
    tokens: int
    """The most that are looked at, in documents from the beginning."""
    held_out: float | None = None
    """Of packed data: only the share of documents that a recipe with this `holdout` never trains on."""

    def check(self) -> None:
        """Say at once what cannot be read."""
        if is_packed(self.place):
            PackedData(self.place)
        elif self.held_out is not None:
            raise BraidError(
                "only packed data has a held-out part",
                f"--data {self.name}={self.place}",
                "Pack it with `braid prepare`, or leave out --held-out.",
            )
        else:
            plan([self.place], Reading())

    def texts(self, tokenizer: BraidTokenizer) -> list[Text]:
        """Its documents, without the end of text; the last one is cut where the tokens are enough."""
        found: list[Text] = []
        left = self.tokens
        for ids in self._documents(tokenizer):
            if len(ids):
                found.append(Text(f"{self.name} {len(found) + 1}", self.name, ids[:left]))
                left -= len(found[-1].ids)
            if left <= 0:
                break
        if not found:
            raise BraidError("there is no text in this data set", f"--data {self.name}={self.place}")
        return found

    def _documents(self, tokenizer: BraidTokenizer) -> Iterator[Sequence[int]]:
        if is_packed(self.place):
            yield from self._packed_documents(tokenizer)
            return
        try:
            for shard in plan([self.place], Reading()).shards:
                for text in documents(shard, Reading()):
                    yield tokenizer.encode(text)
        except BraidError as error:
            todo = "Text that is not plainly read is packed first: `braid prepare SOURCE --tokenizer MODEL --out DIR`."
            raise BraidError(error.what, error.where, todo) from error

    def _packed_documents(self, tokenizer: BraidTokenizer) -> Iterator[list[int]]:
        data = PackedData(self.place)
        facts = data.manifest
        if facts.tokenizer != tokenizer.fingerprint:
            other = differences(tokenizer, load_tokenizer(data.tokenizer_folder))
            raise BraidError(
                f"this data set was packed with another tokenizer than the model's: {'; '.join(other)}",
                f"--data {self.name}={self.place}",
                "Give the text itself, or pack it again with `braid prepare SOURCE --tokenizer MODEL --out DIR`.",
            )
        share = Subset() if self.held_out is None else Subset(1.0 - self.held_out, 1.0)
        for number in np.arange(facts.documents) if share.is_whole else share.choose(facts.documents):
            ids = data.tokens[data.document_starts[number] : data.document_starts[number + 1]].tolist()
            yield ids[:-1] if ids and ids[-1] == facts.eos_id else ids


def prompt_texts(prompts: Sequence[Prompt], tokenizer: BraidTokenizer, context: int, where: str) -> list[Text]:
    """Prompts as tokens, none longer than the model's context: what was decided at their end would not be theirs."""
    if not prompts:
        return []
    encoded = encode_prompts(tokenizer, [prompt.text for prompt in prompts])
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) > context:
            raise BraidError(
                f"the prompt {prompt.label[:40]!r} has {len(ids)} tokens, and the model's context is {context}", where
            )
    return [Text(prompt.label, prompt.domain, ids) for prompt, ids in zip(prompts, encoded, strict=True)]


def data_sources(data: Mapping[str, str | Path] | None, tokens: int, held_out: float | None = None) -> list[DataSource]:
    """The data sets that were asked for, checked."""
    if tokens < 1:
        raise BraidError(f"tokens must be at least 1, got {tokens}")
    if held_out is not None and not 0.0 < held_out <= 1.0:
        raise BraidError(f"held_out must be above 0 and at most 1, got {held_out:g}")
    sources = [DataSource(name, str(place), tokens, held_out) for name, place in (data or {}).items()]
    for source in sources:
        source.check()
    return sources
