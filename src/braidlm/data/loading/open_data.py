"""Open a recipe's data sets from disk, or prepare them on first use, with one tokenizer for all."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from braidlm.core.console import say, warn
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import json_sha256, locked_folder
from braidlm.data.loading.config import DataConfig, DataSetConfig, TokenizerConfig
from braidlm.data.loading.halves import BLOCK_BYTES, Half, documents_of_half
from braidlm.data.loading.sharded_streams import stream_of
from braidlm.data.loading.streams import Subset, TokenStream
from braidlm.data.packing.packed_data import PackedData, is_packed
from braidlm.data.packing.prepare import prepare
from braidlm.data.packing.sharded import open_packed
from braidlm.data.packing.tokenizer_choice import DEFAULT_VOCAB_SIZE, at_least_one, beginning
from braidlm.data.sources.plan import ShardPlan, plan_shards
from braidlm.data.tokenizing.build import load_tokenizer, train_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens, differences
from braidlm.model.config.strict import encode

SAMPLE_CHARACTERS = 32_000_000
"""How much text, over all data sets, a tokenizer is trained on."""


@dataclass
class OpenData:
    """Data sets that are ready for training."""

    train: list[TokenStream]
    validation: list[TokenStream]
    tokenizer: BraidTokenizer


def open_data(config: DataConfig, half: Half | None = None) -> OpenData:
    """Open every data set, preparing what is not there yet; of held-out text all, or one half."""
    config = replace(config, sets={name: data_set.resolved(name) for name, data_set in config.sets.items()})
    packed: dict[str, PackedData] = {}
    for name, data_set in config.sets.items():
        if data_set.path is not None:
            with errors_at(f"data.sets.{name}.path ({data_set.path})"):
                packed[name] = open_packed(data_set.path, config.cache, config.cache_gb)
    tokenizer = _shared_tokenizer(packed, config)
    for name, data_set in config.sets.items():
        if data_set.source is not None:
            packed[name] = _prepare(name, data_set.source, data_set, tokenizer, config)
    opened = OpenData([], [], tokenizer)
    for name, data_set in config.sets.items():
        kept = 1.0 if data_set.validation is not None else 1.0 - data_set.holdout
        share = Subset(data_set.subset.start * kept, data_set.subset.stop * kept, data_set.subset.seed)
        opened.train.append(stream_of(packed[name], share, name))
        if (stream := _validation(name, data_set, packed[name], tokenizer, config, half)) is not None:
            if half is not None:
                sizes = stream.data.document_bytes[stream.chosen].tolist()
                chosen = documents_of_half(sizes, half, f"data set '{stream.name}'")
                stream = stream.of_documents(stream.chosen[chosen])
            opened.validation.append(stream)
    return opened


def _validation(
    name: str,
    data_set: DataSetConfig,
    data: PackedData,
    tokenizer: BraidTokenizer,
    config: DataConfig,
    half: Half | None,
) -> TokenStream | None:
    if data_set.validation is not None:
        source = data_set.validation
        if isinstance(source, str) and is_packed(source):
            held_out_data = open_packed(source, config.cache, config.cache_gb)
            return stream_of(_check_tokenizer(held_out_data, tokenizer, name), name=name)
        data_set = replace(data_set, duplicates="keep", quality=())  # what is measured is not filtered
        sections = None if half is None else BLOCK_BYTES
        return TokenStream(_prepare(f"{name}-validation", source, data_set, tokenizer, config, sections), name=name)
    if data_set.holdout == 0.0:
        return None
    held_out = Subset(1.0 - data_set.holdout, 1.0, data_set.subset.seed)
    unit = "documents" if data.manifest.shards is None else "shards"
    count = data.manifest.documents if data.manifest.shards is None else len(data.manifest.shards)
    if not len(held_out.choose(count)):
        what = f"{data_set.holdout:g} of {count} {unit} is none to validate on"
        todo = "Raise it, name other text as `validation`, or set it to 0 to train without validation."
        raise BraidError(what, f"data.sets.{name}.holdout", todo)
    return stream_of(data, held_out, name)


def _shared_tokenizer(packed: dict[str, PackedData], config: DataConfig) -> BraidTokenizer:
    """The packed sets' tokenizer, or the one that the recipe names."""
    if packed:
        if config.tokenizer != TokenizerConfig():
            warn("data.tokenizer has no effect: packed data sets bring their own tokenizer")
        first = next(iter(packed))
        tokenizer = load_tokenizer(packed[first].tokenizer_folder)
        for name, data in packed.items():
            _check_tokenizer(data, tokenizer, name, first)
        return tokenizer
    kind = config.tokenizer.kind
    asked = [name for name in ("begin", "space_before") if getattr(config.tokenizer, name) not in (False, "nothing")]
    if kind != "bpe" and asked:
        todo = "Leave it out; a tokenizer that is not trained here begins texts as its own files say."
        raise BraidError(f"`{asked[0]}` is of a tokenizer that is trained here", f"data.tokenizer.{asked[0]}", todo)
    return _trained_tokenizer(config) if kind == "bpe" else load_tokenizer(kind)


def _check_tokenizer(
    data: PackedData, tokenizer: BraidTokenizer, name: str, first: str = "the training set"
) -> PackedData:
    if data.manifest.tokenizer != tokenizer.fingerprint:
        other = load_tokenizer(data.tokenizer_folder)
        listed = "; ".join(differences(tokenizer, other))
        what = f"data sets '{first}' and '{name}' were prepared with different tokenizers: {listed}"
        todo = "Prepare them with one tokenizer: `braid prepare SOURCE --tokenizer DIR --out DIR`."
        raise BraidError(what, data.address, todo)
    return data


def _prepare(
    name: str,
    source: str | list[str],
    data_set: DataSetConfig,
    tokenizer: BraidTokenizer,
    config: DataConfig,
    section_bytes: int | None = None,
) -> PackedData:
    options = replace(data_set.read_options(), section_bytes=section_bytes)
    begin = "begin-" if tokenizer.beginning else ""
    facts = {"source": source, "reading": options.facts(), "tokenizer": begin + tokenizer.fingerprint}
    folder = Path(config.cache) / f"{name}-{json_sha256(facts)[:12]}"
    tokenizer_folder = Path(config.cache) / f"tokenizer-{begin}{tokenizer.fingerprint[:12]}"
    if not _is_saved(tokenizer_folder):
        tokenizer.save(tokenizer_folder)  # from which the packing workers load it
    return prepare(source, folder, name=name, tokenizer=tokenizer_folder, replace=True, wait=True, **asdict(options))


def _trained_tokenizer(config: DataConfig) -> BraidTokenizer:
    """A BPE of all sets that are prepared here: the one that an earlier run trained, or trained now."""
    spec = config.tokenizer
    plans = {name: plan_shards(s.source or [], s.read_options()) for name, s in config.sets.items()}
    # The state of the files is in the key, because changed files need a new tokenizer.
    texts = {n: {"files": p.fingerprints, "reading": config.sets[n].read_options().facts()} for n, p in plans.items()}
    key = json_sha256({"tokenizer": encode(spec), "texts": texts})
    folder = Path(config.cache) / f"tokenizer-{key[:12]}"
    if not _is_saved(folder):
        with locked_folder(folder):
            if not _is_saved(folder):  # a run that was waited for has saved it
                _train_tokenizer(config, plans).save(folder)
    return load_tokenizer(folder)


def _train_tokenizer(config: DataConfig, plans: dict[str, ShardPlan]) -> BraidTokenizer:
    """Train on the beginning of each set, each with an equal share of the sample."""
    spec = config.tokenizer
    special = SpecialTokens.parse(spec.special_tokens) if spec.special_tokens else SpecialTokens()
    size = spec.vocab_size or DEFAULT_VOCAB_SIZE
    say(f"Training a tokenizer of {size:,} tokens on {', '.join(config.sets)}.")

    def sample(characters: int) -> Iterator[str]:
        for name, plan in plans.items():
            options, each = config.sets[name].read_options(), characters // len(plans) // len(plan.shards)
            texts = chain.from_iterable(beginning(shard, options, each) for shard in plan.shards)
            yield from at_least_one(texts, f"data.sets.{name}.source")

    return train_tokenizer(sample, SAMPLE_CHARACTERS, size, special, spec.begin, spec.space_before)


def _is_saved(tokenizer_folder: Path) -> bool:
    return (tokenizer_folder / "tokenizer_config.json").is_file()  # the last file that is written
