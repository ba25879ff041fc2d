"""A recipe's data section: named data sets, opened from disk or prepared on first use, with one tokenizer for all."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from braidlm.core.console import say, warn
from braidlm.core.errors import BraidError
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.mixing import MixConfig
from braidlm.data.loading.splits import splits
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed import PackedData, is_packed
from braidlm.data.packing.prepare import USUAL_VOCABULARY, prepare
from braidlm.data.sources import Plan, Reading, documents, plan
from braidlm.data.tokenizing.build import load_tokenizer, train_bpe
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens, differences
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf, encode

SAMPLE_CHARACTERS = 32_000_000
"""How much text, over all data sets, a tokenizer is trained on."""


@dataclass
class TokenizerSpec:
    """The tokenizer of data sets that are prepared on first use."""

    kind: str = "bpe"
    """`bpe` (trained on these data sets), `bytes`, or a folder, file or Hub name."""
    vocab_size: int | None = None
    """For `bpe`: how many tokens."""
    special_tokens: list[str] | None = None
    """For `bpe`: `role=token` in the order of their ids, e.g. [unk=<unk>, bos=<s>, eos=</s>, pad=<pad>]."""

    @classmethod
    def from_shorthand(cls, kind: Any) -> dict[str, Any]:
        return {"kind": kind}


@dataclass
class SetSpec:
    """One data set: a packed folder, a source to prepare, or a corpus with splits."""

    path: str | None = None
    """A folder that `braid prepare` made."""
    source: str | list[str] | None = None
    """Or anything `braid prepare` takes; prepared on first use into the data section's `cache`."""
    folder: str | None = None
    """Or a corpus with a folder to train on and one to validate on: `train` (or `train_10M`) and `dev`, as BabyLM's."""
    documents: int = 10_000
    """For a built-in corpus: how many documents."""
    seed: int = 0
    """For a built-in corpus: its seed."""
    fields: list[str] = field(default_factory=lambda: ["text"])
    """For JSONL and parquet: the fields that make a document."""
    joiner: str = "\n"
    """What stands between the fields."""
    separator: str = "blank"
    """For text files: what parts documents (blank, lines, file, or a text)."""
    encoding: str = "utf-8"
    """For text files and JSONL."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """What to do with bytes that are no text in that encoding."""
    split: str = "train"
    """For a Hub data set, and for a corpus with splits: the one to train on."""
    subset: Subset = field(default_factory=Subset)
    """The share of the training documents to use; shares that do not overlap have no document in common."""
    holdout: float = 0.01
    """The share of documents that is kept for validation and never trained on."""
    validation: str | list[str] | None = None
    """Text to validate on instead: a packed folder or a source."""

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.path, self.source, self.folder)) != 1:
            raise BraidError(
                "give either `path` (a packed folder), `source` (text to prepare) or `folder` (a corpus with splits)"
            )
        if self.folder is not None and self.validation is not None:
            raise BraidError("`folder` brings its own text to validate on; leave out `validation`, or give `source`")
        if not 0.0 <= self.holdout < 1.0:
            raise BraidError(f"holdout must be at least 0 and below 1, got {self.holdout:g}")

    @property
    def has_validation(self) -> bool:
        """Whether it is validated on other text than documents held out from the training text."""
        return self.validation is not None or self.folder is not None

    def settled(self, name: str) -> "SetSpec":
        """A corpus with splits as the source and the validation it stands for; anything else as it is."""
        if self.folder is None:
            return self
        train, held_out = splits(self.folder, self.split, name)
        return replace(self, folder=None, source=train, validation=held_out)

    def reading(self) -> Reading:
        """How the source's documents are read."""
        return Reading(
            fields=tuple(self.fields),
            joiner=self.joiner,
            separator=self.separator,
            encoding=self.encoding,
            errors=self.errors,
            documents=self.documents,
            seed=self.seed,
            split=self.split,
        )


@dataclass
class DataConfig:
    """What is trained on."""

    sets: dict[str, SetSpec]
    """By name; the names are what mixes and reports use."""
    length: int = 256
    """Tokens of a training sequence."""
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    chunking: Annotated[Choice, PartOf(chunkings, "contiguous")] = "contiguous"  # type: ignore[assignment]
    """How sequences are cut."""
    mix: MixConfig = field(default_factory=MixConfig)
    """How data sets share the rows of a batch."""
    cache: str = "data"
    """The folder for what is prepared on first use."""

    def __post_init__(self) -> None:
        if not self.sets:
            raise BraidError("sets: name at least one data set")
        if self.length < 1:
            raise BraidError(f"length must be at least 1, got {self.length}")


@dataclass
class OpenData:
    """Data sets ready to train on."""

    train: list[TokenStream]
    validation: list[TokenStream]
    tokenizer: BraidTokenizer


def open_data(config: DataConfig) -> OpenData:
    """Open every data set, preparing what is not there yet."""
    config = replace(config, sets={name: spec.settled(name) for name, spec in config.sets.items()})
    packed = {name: _opened(spec.path, f"{name}.path") for name, spec in config.sets.items() if spec.path is not None}
    tokenizer = _shared_tokenizer(packed, config)
    for name, spec in config.sets.items():
        if spec.source is not None:
            packed[name] = _prepared(name, spec.source, spec, tokenizer, config)
    train = [TokenStream(packed[name], _training_share(spec), name) for name, spec in config.sets.items()]
    held = [_validation(name, spec, packed[name], tokenizer, config) for name, spec in config.sets.items()]
    return OpenData(train, [stream for stream in held if stream is not None], tokenizer)


def _opened(path: str, key: str) -> PackedData:
    try:
        return PackedData(path)
    except BraidError as error:
        raise BraidError(error.what, f"data.sets.{key} ({path})", error.todo) from error


def _training_share(spec: SetSpec) -> Subset:
    """The set's share of what is not held out."""
    kept = 1.0 if spec.validation is not None else 1.0 - spec.holdout
    return Subset(spec.subset.start * kept, spec.subset.stop * kept, spec.subset.seed)


def _validation(
    name: str, spec: SetSpec, data: PackedData, tokenizer: BraidTokenizer, config: DataConfig
) -> TokenStream | None:
    if spec.validation is not None:
        given = spec.validation
        if isinstance(given, str) and is_packed(given):
            return TokenStream(_same_tokenizer(PackedData(given), tokenizer, name), name=name)
        return TokenStream(_prepared(f"{name}-validation", given, spec, tokenizer, config), name=name)
    if spec.holdout == 0.0:
        return None
    held = Subset(1.0 - spec.holdout, 1.0, spec.subset.seed)
    if not len(held.choose(data.manifest.documents)):
        raise BraidError(
            f"{spec.holdout:g} of {data.manifest.documents} documents is none to validate on",
            f"data.sets.{name}.holdout",
            "Raise it, name other text as `validation`, or set it to 0 to train without validation.",
        )
    return TokenStream(data, held, name)


def _shared_tokenizer(packed: dict[str, PackedData], config: DataConfig) -> BraidTokenizer:
    """The packed sets' tokenizer, or the one the recipe asks for."""
    if packed:
        if config.tokenizer != TokenizerSpec():
            warn("data.tokenizer has no effect: packed data sets bring their own tokenizer")
        first = next(iter(packed))
        tokenizer = load_tokenizer(packed[first].tokenizer_folder)
        for name, data in packed.items():
            _same_tokenizer(data, tokenizer, name, first)
        return tokenizer
    spec = config.tokenizer
    return _trained(config) if spec.kind == "bpe" else load_tokenizer(spec.kind)


def _same_tokenizer(
    data: PackedData, tokenizer: BraidTokenizer, name: str, first: str = "the training set"
) -> PackedData:
    if data.manifest.tokenizer != tokenizer.fingerprint:
        other = load_tokenizer(data.tokenizer_folder)
        raise BraidError(
            f"data sets '{first}' and '{name}' were prepared with different tokenizers: "
            + "; ".join(differences(tokenizer, other)),
            str(data.folder),
            "Prepare them with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`.",
        )
    return data


def _prepared(
    name: str, source: str | list[str], spec: SetSpec, tokenizer: BraidTokenizer, config: DataConfig
) -> PackedData:
    reading = spec.reading()
    key = _key({"source": source, "reading": encode(reading), "tokenizer": tokenizer.fingerprint})
    folder = Path(config.cache) / f"{name}-{key}"
    tokenizer_folder = _saved(tokenizer, config)
    return prepare(
        source,
        folder,
        name=name,
        tokenizer=tokenizer_folder,
        fields=reading.fields,
        joiner=reading.joiner,
        separator=reading.separator,
        encoding=reading.encoding,
        errors=reading.errors,
        documents=reading.documents,
        seed=reading.seed,
        split=reading.split,
        replace=True,
    )


def _trained(config: DataConfig) -> BraidTokenizer:
    """A BPE trained on all the sets that are prepared here, each giving an equal share of the sample."""
    spec = config.tokenizer
    plans = {name: plan(_listed(s), s.reading()) for name, s in config.sets.items()}
    # The state of the files is in the key: a tokenizer of what a file held before would be a poor one for it now.
    texts = {n: {"files": p.facts, "reading": encode(config.sets[n].reading())} for n, p in plans.items()}
    key = _key({"tokenizer": encode(spec), "texts": texts})
    folder = Path(config.cache) / f"tokenizer-{key}"
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(folder)
    special = SpecialTokens.of(spec.special_tokens) if spec.special_tokens else SpecialTokens()
    size = spec.vocab_size or USUAL_VOCABULARY
    say(f"Training a tokenizer of {size:,} tokens on {', '.join(config.sets)}.")
    share = SAMPLE_CHARACTERS // len(config.sets)
    sample = (text for n, p in plans.items() for text in _some_documents(n, p, config.sets[n].reading(), share))
    made = BraidTokenizer(train_bpe(sample, size, special.order), special)
    if made.vocab_size < size:
        warn(f"the text gives a vocabulary of only {made.vocab_size:,} of the {size:,} asked for")
    made.save(folder)
    return made


def _some_documents(name: str, texts: Plan, reading: Reading, characters: int) -> Iterator[str]:
    seen = False
    for shard in texts.shards:
        quota = characters // len(texts.shards)
        for text in documents(shard, reading):
            if not text.strip():
                continue
            seen = True
            yield text
            quota -= len(text)
            if quota <= 0:
                break
    if not seen:
        raise BraidError(
            "there are no documents in it, only empty ones or none",
            f"data.sets.{name}.source",
            "Check the source and its fields.",
        )


def _listed(spec: SetSpec) -> list[str]:
    return [spec.source] if isinstance(spec.source, str) else list(spec.source or [])


def _saved(tokenizer: BraidTokenizer, config: DataConfig) -> Path:
    """A folder of the tokenizer, for prepare's workers to load."""
    folder = Path(config.cache) / f"tokenizer-{tokenizer.fingerprint[:12]}"
    if not (folder / "tokenizer_config.json").is_file():
        tokenizer.save(folder)
    return folder


def _key(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
