"""Where tokenizers come from: train a byte-level BPE, plain bytes, or any Hugging Face fast tokenizer."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from braidlm.core.console import warn
from braidlm.core.errors import BraidError
from braidlm.core.models.runs import newest_checkpoint
from braidlm.core.reading import check_openable, given_path, read_json
from braidlm.data.tokenizing.encoding import PART_CHARS, word_ends
from braidlm.data.tokenizing.tokenizer import (
    BETWEEN_LINES,
    ROLES,
    BraidTokenizer,
    SpaceBefore,
    SpecialTokens,
    byte_characters,
)

COMMON_NAMES = {
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]", "[SEP]"),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>", "[BOS]", "[CLS]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
"""The names of special tokens by role, for files that do not say which token has which role."""
MAX_WORD_CHARS = 1024
"""Longer words are cut: the trainer's time grows with the square of a word's length."""
MAX_DISTINCT_BYTES = 4_000_000
"""The bytes of all different words of a sample. The trainer keeps every different word, at up to 150 bytes of memory
for each byte: about 600 MB. 64 MB of English have 3 to 4 million; text without spaces, or of random names, has more.
"""
MAX_IDS = 2**24
"""Sixty times the largest vocabularies. All that is kept by id has an entry for each id below the largest, and a single
damaged id could ask for gigabytes.
"""


def bytes_tokenizer(special: SpecialTokens | None = None) -> "BraidTokenizer":
    """Plain bytes: byte b has id b, special tokens follow from 256."""
    special = special or SpecialTokens()
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.order])
    return BraidTokenizer(backend, special)


def load_tokenizer(source: str | Path) -> BraidTokenizer:
    """From a folder or file of a tokenizer, a run, GPT-2's vocab.json and merges.txt, "bytes", or a name on the Hub."""
    if str(source) == "bytes":
        return bytes_tokenizer()
    path = given_path(source)
    if path.is_dir():
        return _from_folder(newest_checkpoint(path) or path)
    if path.is_file():
        return _from_file(path, path.with_name("tokenizer_config.json"))
    check_openable(path)
    if path.suffix == ".json" or path.is_absolute() or str(source).startswith(".") or str(source).count("/") > 1:
        todo = "Give a folder with a tokenizer.json, 'bytes', 'bpe' to train one, or a name on the Hub such as 'gpt2'."
        raise BraidError("there is no tokenizer here", str(source), todo)
    return _from_hub(str(source))


def _from_folder(folder: Path) -> BraidTokenizer:
    if (folder / "tokenizer.json").is_file():
        return _from_file(folder / "tokenizer.json", folder / "tokenizer_config.json")
    if (folder / "tokenizer" / "tokenizer.json").is_file():  # a packed data set
        return _from_folder(folder / "tokenizer")
    vocab, merges = sorted(folder.glob("*vocab.json")), sorted(folder.glob("*merges.txt"))
    if len(vocab) == len(merges) == 1:
        return _from_vocab_and_merges(vocab[0], merges[0], folder / "tokenizer_config.json")
    what = "this folder holds no tokenizer: neither tokenizer.json nor one vocab.json with its merges.txt"
    todo = "A slow tokenizer becomes a fast one with transformers: "
    raise BraidError(what, str(folder), f"{todo}`AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)`.")


def _from_file(path: Path, config: Path) -> BraidTokenizer:
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        todo = (
            "If it is damaged, use another copy; the same `braid train` command repairs the last checkpoint of a run."
        )
        raise BraidError(f"this is not a tokenizer.json of a fast tokenizer ({error})", str(path), todo) from None
    return _with_settings(backend, path, config)


def _from_vocab_and_merges(vocab: Path, merges: Path, config: Path) -> BraidTokenizer:
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:
        raise BraidError(f"these are not the vocabulary and merges of a BPE ({error})", str(vocab)) from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {name for common in COMMON_NAMES.values() for name in common}
    special = sorted((backend.token_to_id(name), name) for name in names if backend.token_to_id(name) is not None)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for _, name in special])
    return _with_settings(backend, vocab, config)


def _with_settings(backend: Tokenizer, path: Path, config: Path) -> BraidTokenizer:
    settings = read_json(config) if config.is_file() else {}
    tokenizer = BraidTokenizer(backend, _roles(backend, settings), settings)
    last = tokenizer.vocab_size - 1
    if last < 0:
        raise BraidError("this tokenizer has no tokens", str(path), "Use another copy, or train one with 'bpe'.")
    if last >= MAX_IDS:
        what = f"the token {backend.id_to_token(last)!r:.60} has the id {last:,}, and ids go up to {MAX_IDS - 1:,}"
        todo = "If the file is damaged, use another copy; else number its tokens from 0 without gaps."
        raise BraidError(what, str(path), todo)
    return tokenizer


def _roles(backend: Tokenizer, settings: dict[str, Any]) -> SpecialTokens:
    """The roles that the settings name, else the roles that the names of special tokens suggest."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    roles: dict[str, str | None] = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, (str, NoneType)):
            raise BraidError(f"'{role}_token' in tokenizer_config.json is not a text but {token!r:.40}")
        if token is not None and backend.token_to_id(token) is None:
            token = None  # several published configurations name a token that their vocabulary lacks
        roles[role] = token or next((name for name in COMMON_NAMES[role] if name in special), None)
    return SpecialTokens(**roles)  # type: ignore[arg-type]


def _from_hub(name: str) -> BraidTokenizer:
    """A tokenizer by its name on the Hub, from the local cache if it is there."""
    from huggingface_hub import errors, hf_hub_download

    def fetch(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file))
        except errors.LocalEntryNotFoundError:
            raise  # a subclass of EntryNotFoundError for a missing connection
        except errors.EntryNotFoundError:
            return None

    try:
        tokenizer, config = fetch("tokenizer.json"), fetch("tokenizer_config.json")
        if tokenizer is not None:
            return _from_file(tokenizer, config or tokenizer.with_name("none"))
        vocab, merges = fetch("vocab.json"), fetch("merges.txt")
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        what = f"there is no folder or file '{name}', and no model of that name on the Hub"
        raise BraidError(what, todo="Check the spelling; for a private model log in with `hf auth login`.") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        what = f"there is no folder or file '{name}', and the Hub cannot be reached ({type(error).__name__})"
        todo = "Check the path; or connect once so that the tokenizer gets into the cache; or copy its "
        todo += "tokenizer.json and tokenizer_config.json into a folder and give that."
        raise BraidError(what, todo=todo) from None
    if vocab is None or merges is None:
        todo = "Convert it with transformers: `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`."
        raise BraidError(f"'{name}' has no fast tokenizer (no tokenizer.json) on the Hub", todo=todo)
    return _from_vocab_and_merges(vocab, merges, config or vocab.with_name("none"))


class _TooManyWordsError(Exception):
    """A sample has more different words than the trainer can hold; says after how many characters."""

    def __init__(self, characters: int):
        self.characters = characters


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SpecialTokens.order,
    max_distinct_bytes: float = math.inf,
    space_before: SpaceBefore = "nothing",
) -> Tokenizer:
    """A byte-level BPE with GPT-2's pattern; special tokens get the first ids, in the order given.

    `space_before` puts a space before every text that has none, or before every line too; decoding takes the spaces
    between lines away again.
    """
    min_size = 256 + len(special_tokens)
    if vocab_size < min_size:
        what = f"a vocabulary of {vocab_size} is too small for a byte-level BPE"
        raise BraidError(what, todo=f"Choose at least {min_size}: 256 bytes and {len(special_tokens)} special tokens.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_before != "nothing", use_regex=True)
    backend.decoder = decoders.ByteLevel()
    if space_before == "lines":
        backend.normalizer = normalizers.Replace(*BETWEEN_LINES)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(*reversed(BETWEEN_LINES))])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_parts(texts, max_distinct_bytes), trainer)
    return backend


def train_tokenizer(
    sample: Callable[[int], Iterable[str]],
    characters: int,
    vocab_size: int,
    special: SpecialTokens,
    begin: bool = False,
    space_before: SpaceBefore = "nothing",
) -> BraidTokenizer:
    """A BPE of `sample(characters)`, or of a smaller sample if that one has too many different words.

    With `begin`, texts begin with the token that ends one.
    """
    asked, backend = characters, None
    while backend is None:
        try:
            backend = train_bpe(sample(characters), vocab_size, special.order, MAX_DISTINCT_BYTES, space_before)
        except _TooManyWordsError as error:
            # A smaller sample is spread over the data in the same way, and may have a few more words than this part.
            characters = max(1, int(0.8 * min(characters, error.characters)))
    if characters < asked:
        size = f"{characters / 1e6:.1f} MB"
        warn(f"the tokenizer was trained on only {size} of the text, because it has so many different words")
    tokenizer = BraidTokenizer(backend, special)
    if begin:
        tokenizer.begin_texts()
    if tokenizer.vocab_size < vocab_size:
        warn(f"the text gives a vocabulary of only {tokenizer.vocab_size:,} of the {vocab_size:,} asked for")
    return tokenizer


def _parts(texts: Iterable[str], max_distinct_bytes: float) -> Iterator[str]:
    """Texts short enough for the trainer's buffer, without words that are too long for it, while it can hold them."""
    seen: set[str] = set()
    characters = distinct_bytes = 0
    for part in (part for text in texts for part in word_ends(text, PART_CHARS)):
        words = part.split()
        pieces = [part]
        # A run of spaces is a word to the trainer too.
        if max(map(len, words), default=0) > MAX_WORD_CHARS or 4 * sum(map(len, words)) < len(part):
            pieces = [part[at : at + MAX_WORD_CHARS] for at in range(0, len(part), MAX_WORD_CHARS)]
            words = [word for piece in pieces for word in piece.split()]
        unseen = set(words) - seen
        seen |= unseen
        characters, distinct_bytes = characters + len(part), distinct_bytes + len("".join(unseen).encode())
        if distinct_bytes > max_distinct_bytes and characters > PART_CHARS:
            raise _TooManyWordsError(characters)
        yield from pieces
