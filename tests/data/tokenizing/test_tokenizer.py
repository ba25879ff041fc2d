"""Training, loading, saving and comparing tokenizers."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.build import (
    BraidTokenizer,
    SpecialTokens,
    bytes_tokenizer,
    load_tokenizer,
    train_bpe,
)
from braidlm.data.tokenizing.tokenizer import SpaceBefore, differences

TEXTS = ["Once upon a time there was a little fox.", "The fox said: it's 25 o'clock!\n\nÜber 你好."] * 5
MOEP = ["unk=<unk>", "bos=<s>", "eos=</s>", "pad=<pad>", "mask=<mask>"]


@pytest.fixture(scope="module")
def bpe() -> BraidTokenizer:
    return BraidTokenizer(train_bpe(TEXTS, 300), SpecialTokens())


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(bpe: BraidTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    assert bytes_tokenizer().decode(bytes_tokenizer().encode(text)) == text


def test_trained_vocabulary_and_default_roles(bpe: BraidTokenizer) -> None:
    assert bpe.vocab_size == 300
    assert (bpe.eos_id, bpe.bos_id, bpe.pad_id, bpe.special.unk) == (0, 0, 1, None)
    assert len(bpe.encode("a little fox")) < len("a little fox")
    assert bpe.encode_batch(["fox", ""]) == [bpe.encode("fox"), []]


def test_order_of_special_tokens_fixes_their_ids() -> None:
    special = SpecialTokens.parse(MOEP)
    tokenizer = BraidTokenizer(train_bpe(TEXTS, 300, special.order), special)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert [tokenizer.backend.token_to_id(token) for token in (special.unk, special.mask)] == [0, 4]
    assert special == SpecialTokens.parse(dict(item.split("=") for item in MOEP))


def test_the_pause_is_a_special_token_of_its_name(bpe: BraidTokenizer, tmp_path: Path) -> None:
    special = SpecialTokens.parse(["eos=</s>", "<pause>"])
    tokenizer = BraidTokenizer(train_bpe(TEXTS, 300, special.order), special)
    tokenizer.save(tmp_path)
    for one in (tokenizer, load_tokenizer(tmp_path)):
        assert one.pause_id == 1
        assert one.pause_id not in one.encode("a <pause> in a text")
        assert one.decode([*one.encode("a"), 1], skip_special_tokens=True) == "a"
    assert bpe.pause_id is None


def test_texts_begin_with_the_token_that_ends_one(tmp_path: Path) -> None:
    tokenizer = BraidTokenizer(train_bpe(TEXTS, 300, SpecialTokens.parse(MOEP).order), SpecialTokens.parse(MOEP))
    plain = tokenizer.identity()
    assert tokenizer.beginning == []
    tokenizer.begin_texts()
    tokenizer.save(tmp_path)
    for one in (tokenizer, load_tokenizer(tmp_path)):
        assert one.beginning == [one.eos_id]
        assert one.encode("a fox") == one.backend.encode("a fox").ids[1:]
        assert (one.fingerprint, one.identity() == plain) == (plain["fingerprint"], False)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    ids = opened("a fox").input_ids
    assert ids == [tokenizer.eos_id, *tokenizer.encode("a fox")]
    assert opened.decode(ids, skip_special_tokens=True) == "a fox"
    with pytest.raises(BraidError, match="no token has the role 'eos'"):
        bytes_tokenizer(SpecialTokens.parse(["<x>"])).begin_texts()


def spaced_tokenizer(what: SpaceBefore) -> BraidTokenizer:
    return BraidTokenizer(train_bpe([*TEXTS, "a fox\na fox\n\n"], 300, space_before=what), SpecialTokens())


def test_a_space_before_every_text(tmp_path: Path) -> None:
    """Then a word is one token wherever it stands; transformers makes the same of the saved files."""
    plain, spaced = (spaced_tokenizer(what) for what in ("nothing", "texts"))
    assert (plain.space_before, spaced.space_before) == ("nothing", "texts")
    assert plain.fingerprint != spaced.fingerprint
    spaced.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_prefix_space"] is True
    for one in (spaced, load_tokenizer(tmp_path)):
        assert one.encode("fox") == one.encode(" fox") == opened("fox").input_ids
        assert one.encode("a fox") == one.encode("a") + one.encode("fox")
        assert one.decode(one.encode("fox")) == " fox"
    assert plain.encode("fox") != plain.encode(" fox")


@given(st.text(alphabet="a fox\n\té漢", max_size=20))
def test_a_space_before_every_line(lines: str) -> None:
    """A word is one token at the beginning of a line too, and decoding gives the lines as they were."""
    assert LINES.space_before == "lines"
    assert LINES.encode("a\nfox")[-1:] == LINES.encode("fox") == LINES.encode("a fox")[-1:]
    text = f"a{lines}"
    assert LINES.decode(LINES.encode(text)) == f" {text}"


LINES = spaced_tokenizer("lines")


def test_saved_lines_are_those_of_transformers(tmp_path: Path) -> None:
    LINES.save(tmp_path)
    opened, text = AutoTokenizer.from_pretrained(tmp_path), "a fox\n  a\n\nfox\n"
    assert load_tokenizer(tmp_path).space_before == "lines"
    assert opened(text).input_ids == LINES.encode(text)
    assert opened.decode(opened(text).input_ids) == f" {text}"


def test_plain_bytes_have_their_own_value() -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode("Aé\n") == list("Aé\n".encode())
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.is_plain_bytes
    assert tokenizer.backend.get_vocab()[tokenizer.backend.id_to_token(0)] == 0


def test_special_tokens_in_text_are_text(bpe: BraidTokenizer) -> None:
    ids = bpe.encode("a <|endoftext|> b")
    assert bpe.eos_id not in ids
    assert bpe.decode(ids) == "a <|endoftext|> b"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["eof=</s>"], "unknown role 'eof' of a special token. Did you mean 'eos'?"),
        (["eos=a", "eos=b"], "two special tokens have the role 'eos': 'a' and 'b'"),
        (["eos="], "the special token of role 'eos' is empty"),
    ],
)
def test_wrong_special_tokens(tokens: list[str], text: str) -> None:
    with pytest.raises(BraidError) as caught:
        SpecialTokens.parse(tokens)
    assert str(caught.value) == text


def test_tokens_without_a_role_and_with_equals_signs() -> None:
    special = SpecialTokens.parse(["eos=<e>", "<user>", "<a=b>"])
    assert special.order == ("<e>", "<user>", "<a=b>")
    assert special.bos == "<e>"
    assert special.pad is None


def test_vocabulary_too_small() -> None:
    with pytest.raises(BraidError, match="a vocabulary of 200 is too small for a byte-level BPE\nChoose at least 258"):
        train_bpe(TEXTS, 200)


def test_saved_folder_opens_in_transformers(bpe: BraidTokenizer, tmp_path: Path) -> None:
    moep = SpecialTokens.parse(MOEP)
    for number, tokenizer in enumerate(
        (bpe, bytes_tokenizer(), BraidTokenizer(train_bpe(TEXTS, 300, moep.order), moep)),
    ):
        folder = tmp_path / str(number)
        tokenizer.save(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        for text in TEXTS[:2]:
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (
            tokenizer.eos_id,
            tokenizer.bos_id,
            tokenizer.pad_id,
        )
        assert theirs.mask_token == tokenizer.special.mask
        assert load_tokenizer(folder).identity() == tokenizer.identity()
        theirs.save_pretrained(folder / "again")
        assert load_tokenizer(folder / "again").identity() == tokenizer.identity()


def test_fingerprint_ignores_formatting_padding_and_truncation(bpe: BraidTokenizer, tmp_path: Path) -> None:
    definition = json.loads(bpe.backend.to_str())
    definition["model"]["merges"] = [" ".join(merge) for merge in definition["model"]["merges"]]
    definition["model"]["vocab"] = dict(reversed(definition["model"]["vocab"].items()))
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    other = load_tokenizer(tmp_path / "tokenizer.json")
    assert other.fingerprint == bpe.fingerprint
    assert differences(other, bpe) == []
    assert other.encode(TEXTS[0]) == bpe.encode(TEXTS[0])  # and the truncation is off


def test_fingerprint_sees_one_token_and_differences_name_it(bpe: BraidTokenizer, tmp_path: Path) -> None:
    text = bpe.backend.to_str()
    definition = json.loads(text)
    vocab = definition["model"]["vocab"]
    names = {index: token for token, index in vocab.items()}
    vocab[names[2]], vocab[names[3]] = 3, 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    other = load_tokenizer(tmp_path)
    assert other.fingerprint != bpe.fingerprint
    assert differences(bpe, other) == [
        "id 2 is '!' in one and '\"' in the other",
        "id 3 is '\"' in one and '!' in the other",
    ]
    assert differences(bpe, bytes_tokenizer())[0] == "the vocabularies have 300 and 258 tokens"
    assert len(differences(bpe, bytes_tokenizer())) == 5


def test_fingerprint_sees_the_first_token_and_the_order_of_merges(bpe: BraidTokenizer, tmp_path: Path) -> None:
    renamed = bpe.backend.to_str().replace("<|endoftext|>", "<|end|>")
    (tmp_path / "a.json").write_text(renamed)
    assert load_tokenizer(tmp_path / "a.json").fingerprint != bpe.fingerprint
    definition = json.loads(bpe.backend.to_str())
    definition["model"]["merges"][:2] = definition["model"]["merges"][1::-1]
    (tmp_path / "b.json").write_text(json.dumps(definition))
    other = load_tokenizer(tmp_path / "b.json")
    assert differences(bpe, other) == ["they have the same tokens and merge them differently"]


def test_gpt2_files(tmp_path: Path) -> None:
    tokenizer = BraidTokenizer(train_bpe(TEXTS, 320, ["<|endoftext|>"]), SpecialTokens(pad=None))
    definition = json.loads(tokenizer.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(definition["vocab"]))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in definition["merges"]) + "\n"
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded.identity() == tokenizer.identity()
    assert loaded.eos_id == tokenizer.eos_id


def test_roles_come_from_the_settings_or_the_usual_names(tmp_path: Path) -> None:
    tokenizer = BraidTokenizer(
        train_bpe(TEXTS, 300, ["</s>", "<pad>", "<end>"]), SpecialTokens(eos="</s>", bos=None, pad=None)
    )
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).special.eos == "</s>"
    assert load_tokenizer(tmp_path).special.pad == "<pad>"
    config = {"eos_token": {"content": "<end>"}, "unk_token": "<absent>", "chat_template": "{{ x }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert loaded.special.eos == "<end>"
    assert loaded.special.unk is None
    loaded.save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy/tokenizer_config.json").read_text())["chat_template"] == "{{ x }}"
    assert loaded.with_roles(SpecialTokens.parse(["eos=</s>"])).special.eos == "</s>"
    with pytest.raises(BraidError, match="the tokenizer has no token '<x>' for the role 'eos'"):
        loaded.with_roles(SpecialTokens.parse(["eos=<x>"]))


def test_loading_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BraidError, match="there is no tokenizer here"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(BraidError, match="these links lead in a circle"):
        load_tokenizer(tmp_path / "circle")
    with pytest.raises(BraidError, match=r"this folder holds no tokenizer: neither tokenizer.json nor one vocab.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BraidError, match=r"this is not a tokenizer.json of a fast tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("index", [2**24, 2**31, 2**32 - 1])
def test_an_id_that_would_fill_the_memory_is_refused(file: str, index: int, tmp_path: Path) -> None:
    backend = json.loads(bytes_tokenizer().backend.to_str())
    backend["model"]["vocab"]["far"] = index
    (tmp_path / "merges.txt").touch()
    (tmp_path / file).write_text(json.dumps(backend if file == "tokenizer.json" else backend["model"]["vocab"]))
    what = f"the token 'far' has the id {index:,}, and ids go up to 16,777,215"
    with pytest.raises(BraidError, match=what) as raised:
        load_tokenizer(tmp_path)
    assert raised.value.where == str(tmp_path / file)
    assert "If the file is damaged, use another copy" in raised.value.todo


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").touch()
    with pytest.raises(BraidError, match="this tokenizer has no tokens"):
        load_tokenizer(tmp_path)


def test_hub_names_offline_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def unreachable(name: str, file: str) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(BraidError, match="no folder or file 'some/model', and the Hub cannot be reached"):
        load_tokenizer("some/model")


def test_hub_names_are_fetched(bpe: BraidTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    bpe.save(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(tmp_path / file))
    assert load_tokenizer("some/model").identity() == bpe.identity()


def test_a_run_is_read_from_its_newest_checkpoint(bpe: BraidTokenizer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    bpe.save(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path).identity() == bpe.identity()
