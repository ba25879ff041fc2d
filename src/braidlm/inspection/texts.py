"""The texts to look at, as a model's own tokens in windows, and the path that is right for the domain of each."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braidlm.core.decoding.generation import Prompt, encode_prompts
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.loading.sharded_streams import stream_of
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.packed_data import is_packed
from braidlm.data.packing.sharded import open_packed
from braidlm.data.sources.plan import ReadOptions, plan_shards
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences

ProgressCallback = Callable[[float, str], None]
"""Called with the tokens that are done, as `core.console.progress` gives it."""


@dataclass(frozen=True)
class Text:
    name: str
    domain: str | None
    ids: Sequence[int]


@dataclass(frozen=True)
class Texts:
    """All texts that one model reads."""

    prompts: list[Text]
    data: dict[str, list[Text]]
    """The documents of each data set."""

    @property
    def all(self) -> list[Text]:
        return [*self.prompts, *(text for texts in self.data.values() for text in texts)]

    @property
    def tokens(self) -> int:
        return sum(len(text.ids) for text in self.all)


@dataclass(frozen=True)
class DataSource:
    """A data set by name: a packed folder, or text that the model's tokenizer makes into tokens."""

    name: str
    path: str
    max_tokens: int
    """How many tokens are read, in documents from the beginning."""
    held_out: float | None = None
    """Only this share of packed documents is read, which a recipe with this `holdout` never trains on."""
    called: str = ""
    """What errors call it; by default the option of `braid routes`."""

    @property
    def where(self) -> str:
        return self.called or f"--data {self.name}={self.path}"

    def check(self) -> None:
        """Raise an error for what cannot be read."""
        if is_packed(self.path):
            open_packed(self.path)
        elif self.held_out is not None:
            todo = "Pack it with `braid prepare`, or leave out --held-out."
            raise BraidError("only packed data has a held-out part", self.where, todo)
        else:
            plan_shards([self.path], ReadOptions())

    def texts(self, tokenizer: BraidTokenizer) -> list[Text]:
        """The documents of the data set, without the end of text; the last one is cut at `max_tokens` in all."""
        texts: list[Text] = []
        left = self.max_tokens
        for ids in self._documents(tokenizer):
            if len(ids):
                texts.append(Text(f"{self.name} {len(texts) + 1}", self.name, ids[:left]))
                left -= len(texts[-1].ids)
            if left <= 0:
                break
        if not texts:
            raise BraidError("there is no text in this data set", self.where)
        return texts

    def _documents(self, tokenizer: BraidTokenizer) -> Iterator[Sequence[int]]:
        if not is_packed(self.path):
            try:
                for shard in plan_shards([self.path], ReadOptions()).shards:
                    for text in shard.format.documents(shard, ReadOptions()):
                        yield tokenizer.encode(text)
            except BraidError as error:
                todo = "Text that is not plainly read is packed first: "
                todo += "`braid prepare SOURCE --tokenizer MODEL --out DIR`."
                raise BraidError(error.what, error.where, todo) from error
            return
        data = open_packed(self.path)
        if data.manifest.tokenizer != tokenizer.fingerprint:
            differing = differences(tokenizer, load_tokenizer(data.tokenizer_folder))
            what = f"this data set was packed with another tokenizer than the model's: {'; '.join(differing)}"
            todo = "Give the text itself, or pack it again with `braid prepare SOURCE --tokenizer MODEL --out DIR`."
            raise BraidError(what, self.where, todo)
        share = Subset() if self.held_out is None else Subset(1.0 - self.held_out, 1.0)
        for number in stream_of(data, share).chosen:
            ids = data.tokens[data.document_starts[number] : data.document_starts[number + 1]].tolist()
            yield ids[:-1] if ids and ids[-1] == data.manifest.eos_id else ids


def prompt_texts(prompts: Sequence[Prompt], tokenizer: BraidTokenizer, context: int | None, where: str) -> list[Text]:
    """Prompts as tokens; each must fit into the model's context, so that the choice at its end has seen all of it."""
    encoded = encode_prompts(tokenizer, [prompt.text for prompt in prompts]) if prompts else []
    texts = [Text(prompt.label, prompt.domain, ids) for prompt, ids in zip(prompts, encoded, strict=True)]
    for text in texts:
        if context is not None and len(text.ids) > context:
            what = f"the prompt {text.name[:40]!r} has {len(text.ids)} tokens, and the model's context is {context}"
            raise BraidError(what, where)
    return texts


def right_paths(
    domains: Iterable[str], paths: Sequence[str], path_of: Mapping[str, str], where: str
) -> dict[str, str | None]:
    """The path of each domain: the one `path_of` says, the one of the same name, or the one of that number from 1.

    Where neither a domain nor what `path_of` says fits a path of the model, none has a right path: what it says may be
    about another model. Where one of several does not fit, that is an error.
    """
    right: dict[str, str | None] = dict.fromkeys(domains)
    near = any(name.isdecimal() or "Did you mean" in did_you_mean(name, paths) for name in right)
    if not any(_fits(path, paths) for path in (*right, *path_of.values())) and (path_of or not near):
        return right
    for name in right:
        wanted = next((each for each in (path_of.get(name, name), name) if _fits(each, paths)), None)
        if path_of.get(name) == "":  # the user says that no path is right
            continue
        if wanted is None:
            todo = f"Say which path should know it: `--domains {name}=PATH`, or `--domains {name}=` if none should."
            raise BraidError(f"the domain '{name}' is no path of this model.{did_you_mean(name, paths)}", where, todo)
        right[name] = paths[int(wanted) - 1] if wanted.isdecimal() else wanted
    return right


def check_domains(path_of: Mapping[str, str], domains: Sequence[str], paths: Sequence[str]) -> None:
    """Every domain of a mapping must be some text's, and every path some model's."""
    for domain, path in path_of.items():
        if domain not in domains:
            known = did_you_mean(domain, domains) or " None has a domain."
            raise BraidError(f"no prompt or data set has the domain '{domain}'.{known}", "--domains")
        if path and not _fits(path, paths):
            raise BraidError(f"no model has a path '{path}'.{did_you_mean(path, paths)}", f"--domains {domain}={path}")


def _fits(name: str, paths: Sequence[str]) -> bool:
    return name in paths or (name.isdecimal() and 1 <= int(name) <= len(paths))


@dataclass(frozen=True)
class Windows:
    """Parts of texts that are read together."""

    texts: list[int]
    """For each window the index of its text."""
    starts: list[int]
    """For each window the position in its text at which it begins."""
    rows: list[Sequence[int]]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids [window, time], padded on the right, and the mask that is 0 there."""
        length = max(map(len, self.rows))
        ids = [[*row, *[0] * (length - len(row))] for row in self.rows]
        mask = [[1] * len(row) + [0] * (length - len(row)) for row in self.rows]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def windows_of(texts: Sequence[Sequence[int]], size: int, batch: int) -> Iterator[Windows]:
    """All texts in windows of at most `size` tokens, `batch` of them at once.

    Windows of similar length come together, so that there is little padding; it is never counted.
    """
    order = [(number, at) for number, text in enumerate(texts) for at in range(0, len(text), size)]
    order.sort(key=lambda window: min(size, len(texts[window[0]]) - window[1]))
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        rows = [texts[number][at : at + size] for number, at in part]
        yield Windows([number for number, _ in part], [at for _, at in part], rows)
