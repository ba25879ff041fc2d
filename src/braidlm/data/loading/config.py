"""A recipe's data section: named data sets, how they are mixed and cut, and the tokenizer that they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import given_path
from braidlm.data.loading.chunking import chunkings
from braidlm.data.loading.order import orders
from braidlm.data.loading.streams import Subset
from braidlm.data.packing.sharded import DEFAULT_CACHE_GB
from braidlm.data.sources.format import Reading, ReadOptions
from braidlm.data.tokenizing.tokenizer import SpaceBefore
from braidlm.model.config.ranges import Length, NonNegative, Positive, Rate, Share, VocabularySize
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf

VALIDATION_SPLIT = "dev"
CACHE_KEYS = ("cache", "cache_gb")
"""Keys of the data section that say where text is kept, and not what it is."""


@dataclass
class TokenizerConfig:
    """The tokenizer of data sets that are prepared on first use."""

    kind: str = "bpe"
    """`bpe` (trained on these data sets), `bytes`, or a folder, file or Hub name."""
    vocab_size: VocabularySize | None = None
    """For `bpe`: how many tokens."""
    special_tokens: list[str] | None = None
    """For `bpe`: `role=token` in the order of their ids, e.g. [unk=<unk>, bos=<s>, eos=</s>, pad=<pad>]."""
    begin: bool = False
    """For `bpe`: put the token that ends a text before every text too, as it stands before every document that is
    trained on. Then a model knows where a text begins, and its first word is scored too."""
    space_before: SpaceBefore = "nothing"
    """For `bpe`: put a space before `texts` that have none, so that a first word is the token that it is within a line;
    BabyLM's reading times score each word as a text of its own, and need it. `lines` does so before every line too."""

    @classmethod
    def from_shorthand(cls, kind: Any) -> dict[str, Any]:
        return {"kind": kind}


@dataclass(frozen=True)
class DataPlace:
    """Where the text of a data set is, which is said by one key."""

    path: str | None = None
    """A folder that `braid prepare` made, or the address of shards (`s3://...`)."""
    source: str | list[str] | None = None
    """Or anything `braid prepare` takes; prepared on first use into the data section's `cache`."""
    folder: str | None = None
    """Or a corpus with a folder to train on and one to validate on: `train` (or `train_10M`) and `dev`, as BabyLM's, or
    files `train.txt` and `dev.txt`."""


@dataclass(frozen=True)
class DataSetConfig(Reading, DataPlace):
    """One data set: a packed folder, a source to prepare, or a corpus with splits."""

    configuration: str | None = None
    """For a Hub data set that has several configurations: which."""
    subset: Subset = field(default_factory=Subset)
    """The share of the training documents to use; shares that do not overlap have no document in common."""
    holdout: Rate = 0.01
    """The share of documents that is kept for validation and never trained on."""
    validation: str | list[str] | None = None
    """Text to validate on instead: a packed folder or a source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("path", "source", "folder") if getattr(self, name) is not None]
        if len(given) != 1:
            out = "` or `".join(f"{name}=null" for name in given)
            both = f"; `{'` and `'.join(given)}` are given, and `{out}` takes one out" if given else ""
            what = "give either `path` (a packed folder), `source` (text to prepare) or `folder` (a corpus with splits)"
            raise BraidError(what + both)
        if self.path is not None and self.answer is not None:
            what = "`answer` has no effect on a packed folder"
            raise BraidError(what, todo="Pack it with `braid prepare SOURCE --answer NAME`.")
        if self.folder is not None and self.validation is not None:
            raise BraidError("`folder` brings its own text to validate on; leave out `validation`, or give `source`")

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is separate, and not documents held out from the training text."""
        return self.validation is not None or self.folder is not None

    def resolved(self, name: str) -> "DataSetConfig":
        """A corpus with splits as the source and the validation that it stands for; other data sets unchanged."""
        if self.folder is None:
            return self
        train, validation = find_splits(self.folder, self.split, name)
        return replace(self, folder=None, source=train, validation=validation)

    def read_options(self) -> ReadOptions:
        """How the source's documents are read."""
        return ReadOptions(
            **{each.name: getattr(self, each.name) for each in fields(Reading)}, subset=self.configuration
        )


@dataclass
class CurriculumPoint:
    """The weights at one point of the training."""

    at: Share
    """Training progress, 0 at the beginning and 1 at the end."""
    weights: dict[str, NonNegative]
    """Weight per data set; one that is not named has none at this point."""

    def __post_init__(self) -> None:
        _check_weights(self.weights)


@dataclass
class MixtureConfig:
    """How several data sets share the rows."""

    weights: dict[str, NonNegative] | None = None
    """Share of the rows per data set, in any unit; without it, in proportion to the data sets' tokens, or to their
    documents where each is a row."""
    curriculum: list[CurriculumPoint] = field(default_factory=list)
    """Instead of `weights`: the shares at points of the training, interpolated linearly."""

    def __post_init__(self) -> None:
        if self.weights is not None and self.curriculum:
            raise BraidError("give either weights or a curriculum, not both")
        _check_weights(self.weights)
        for before, after in pairwise(self.curriculum):
            if after.at <= before.at:
                raise BraidError(f"curriculum: the points must rise, but {after.at:g} comes after {before.at:g}")


@dataclass(kw_only=True)
class SharedData:
    """What all data sets of a training share, and all trainings of a study."""

    length: Length = 256
    """Tokens of a training sequence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """One tokenizer for all data sets, so that models of each can be composed."""
    chunking: Annotated[Choice, PartOf(chunkings, "contiguous")] = "contiguous"  # type: ignore[assignment]
    """How sequences are cut."""
    order: Annotated[Choice, PartOf(orders, "shuffled")] = "shuffled"  # type: ignore[assignment]
    """In which order documents are read, in each data set."""
    cache: str = "data"
    """The folder for what is prepared on first use, and for shards of data sets at addresses."""


@dataclass
class DataConfig(SharedData):
    """What is trained on."""

    sets: dict[str, DataSetConfig]
    """By name; the names are what mixes and reports use."""
    mix: MixtureConfig = field(default_factory=MixtureConfig)
    """How data sets share the rows of a batch."""
    pauses: Rate = 0.0
    """The share of a sequence that is pause tokens: they stand at random places in the text, give the model time before
    the token after them, and are never predicted. The tokenizer needs the special token `<pause>`."""
    cache_gb: Positive = DEFAULT_CACHE_GB
    """How much disk shards of data sets at addresses may take in the cache; those that were used last stay."""

    def __post_init__(self) -> None:
        if not self.sets:
            raise BraidError("sets: name at least one data set")


def find_splits(folder: str, train: str, name: str) -> tuple[str, str]:
    """The folders of training and validation text in a corpus folder for data set `name`, such as BabyLM's.

    Each is called `train` or `dev`, or is the only one whose name begins so: `train_10M`; or it is a file, `train.txt`.
    """
    path = given_path(folder)
    advice = (
        f"Name it with `domains.{name}.folder=DIR` (in a recipe of one run, `data.sets.{name}.folder=DIR`): a folder "
        f"that holds a folder `{train}` (or one whose name begins so, such as `{train}_10M`) and a folder "
        f"`{VALIDATION_SPLIT}`, or files of these names such as `{train}.txt`."
    )
    if not path.is_dir():
        raise BraidError(f"the corpus '{name}' is not there: there is no such folder", folder, advice)
    return _find_split(path, train, name, advice), _find_split(path, VALIDATION_SPLIT, name, advice)


def _find_split(folder: Path, split: str, name: str, advice: str) -> str:
    if (folder / split).exists():
        return str(folder / split)
    inside = list(folder.iterdir())
    matches = sorted(item.name for item in inside if item.is_dir() and item.name.startswith(split))
    matches = matches or sorted(item.name for item in inside if item.is_file() and item.name.startswith(f"{split}."))
    if not matches:
        raise BraidError(f"the corpus '{name}' has no folder `{split}` and no file of that name", str(folder), advice)
    if len(matches) > 1:
        which = (
            f"Say which: `domains.{name}.split={matches[0]}` (in a recipe of one run, `data.sets.{name}.split=...`)."
        )
        alone = "Leave only one, or give `source` and `validation` in place of `folder`, for example "
        todo = f"{alone}validation={folder / matches[0]}." if split == VALIDATION_SPLIT else which
        what = f"the corpus '{name}' has more than one folder or file that begins with `{split}`: {', '.join(matches)}"
        raise BraidError(what, str(folder), todo)
    return str(folder / matches[0])


def _check_weights(weights: Mapping[str, float] | None) -> None:
    if weights is not None and not sum(weights.values()) > 0:
        raise BraidError("at least one weight must be above zero")
