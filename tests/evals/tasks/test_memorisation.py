"""What a folder gives away: canaries and passages of an overfitted model are found, those of a fresh one are not."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.evals.evaluate import evaluate
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.results import QUOTES, TaskResult
from braidlm.evals.tasks.memorisation import COPIED, Verbatim, _passages, true_positives
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM

TOKENIZER = bytes_tokenizer()
CANARIES = ("the code of the safe is 4711 0815", "my number is 90210")
WORDS = ("sea", "old", "boat", "wind", "stone", "bird", "cold", "light", "road", "green", "house", "tree", "night")


def sentences(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=28)) for _ in range(3)]


def model(steps: int, texts: list[str]) -> BraidForCausalLM:
    """A model that has read these texts so many times, all at once."""
    torch.manual_seed(0)
    block = {"attention": {"heads": 2}, "feed": {"hidden": 96}}
    architecture = {"width": 48, "context": 128, "stages": [{"block": {"layers": 2}}], "block": block}
    made = BraidForCausalLM(BraidConfig(architecture, vocab_size=TOKENIZER.vocab_size))
    whole = [TOKENIZER.backend.encode(text).ids for text in texts]
    ids = [[TOKENIZER.eos_id, *text][:128] for text in whole]
    ids += [text[at:96] for text in whole for at in (0, 32, 48) if len(text) > 96]  # as passages begin
    longest = max(map(len, ids))
    batch = torch.tensor([[*one, *[TOKENIZER.eos_id] * (longest - len(one))] for one in ids])
    optimizer = torch.optim.AdamW(made.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = made(batch).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An overfitted model, a fresh one and a reference, with the owner's text, the others' and the canaries."""
    folder = tmp_path_factory.mktemp("memorisation")
    own, others = [*sentences(1), *CANARIES], sentences(2)
    (folder / "owner.txt").write_text("\n\n".join(own), encoding="utf-8")
    (folder / "others.txt").write_text("\n\n".join(others), encoding="utf-8")
    (folder / "canaries.txt").write_text("\n".join(CANARIES), encoding="utf-8")
    for name, steps in (("overfitted", 180), ("fresh", 0), ("reference", 20)):
        trained = model(steps, sentences(3) if name == "reference" else own)
        save_model(trained, folder / name, TOKENIZER, {"made_by": "a test"})
    return folder


def scored(home: Path, name: str, **settings: Any) -> TaskResult:
    texts = {"owner": home / "owner.txt", "others": home / "others.txt"}
    asked = Settings(canaries=str(home / "canaries.txt"), samples=32, **settings)
    found = evaluate([home / name], "memorisation", data_of=texts, settings=asked, device="cpu", out=home / "out")
    return found.models[0].tasks["memorisation"]


def test_an_overfitted_model_gives_its_text_away(home: Path) -> None:
    found = scored(home, "overfitted", reference=str(home / "reference"))
    assert found.score == found.parts["prefix 64"].score > 80
    assert found.parts["others, prefix 64"].score == 0
    assert found.also["exposure of canary 1, bits"] > 9
    assert found.also["exposure of canary 2, bits"] > 9
    for attack in ("loss", "loss against the reference's"):
        assert found.also[f"membership by {attack}, AUC"] > 0.95
        assert found.also[f"membership by {attack}, true positives at 0.1% false ones, %"] > 80
    assert found.also["sampled texts with 100 characters of the owner's, %"] > 0
    owned = (home / "owner.txt").read_text()
    shown = found.notes[QUOTES]
    assert {quote["kind"] for quote in shown} == {"reproduced", "sampled"}
    assert all(quote["prompt"] + quote["text"] in owned for quote in shown)
    page = (home / "out" / "results.html").read_text()
    assert shown[0]["text"].split()[1] in page


def test_a_fresh_model_gives_nothing_away(home: Path) -> None:
    found = scored(home, "fresh")
    assert found.score == 0
    assert found.also["sampled texts with 100 characters of the owner's, %"] == 0
    assert 0.2 < found.also["membership by loss, AUC"] < 0.8
    assert max(found.also[f"exposure of canary {n}, bits"] for n in (1, 2)) < 8
    assert not found.notes[QUOTES]


def test_the_command_line(home: Path, tmp_path: Path, eval_verb: Any) -> None:
    done = eval_verb(
        *(home / "fresh", "memorisation", "--data", f"owner={home / 'owner.txt'}", f"others={home / 'others.txt'}"),
        *("--samples", 0, "--device", "cpu", "--out", tmp_path / "out"),
    )
    assert done.code == 0, done.err
    assert "memorisation" in done.out
    lacking = eval_verb(home / "fresh", "memorisation", "--out", tmp_path / "out")
    assert lacking.code == 2
    assert "--data owner=PATH" in lacking.err


def test_what_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "words.txt").write_text("no secret here", encoding="utf-8")
    owner = {"owner": home / "owner.txt"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"others": home / "others.txt"}, {}, "owner: its data is not in"),
        ({"memorisation": home / "owner.txt"}, {}, "data is given for 'memorisation'"),
        ({"owner": tmp_path / "short.txt"}, {}, "every text needs a document of 48 tokens"),
        (owner, {"canaries": str(tmp_path / "words.txt")}, "there is none in 'no secret here'"),
        (owner, {"reference": str(home / "reference")}, "there is no such text"),
    ]
    for texts, settings, words in cases:
        with pytest.raises(BraidError, match=words):
            evaluate([home / "fresh"], "memorisation", data_of=texts, settings=Settings(**settings), device="cpu")


@given(before=st.text("abc ", max_size=80), after=st.text("abc ", max_size=80), at=st.integers(0, 200))
def test_what_was_copied_is_found_whole(before: str, after: str, at: int) -> None:
    rng = random.Random(5)
    text = "".join(rng.choices("defghijklmnop", k=400))
    piece = text[at : at + COPIED + 17]
    assert Verbatim(iter([text])).longest(before + piece + after) == piece
    assert Verbatim(iter([])).longest(piece) == ""


def test_a_piece_that_begins_alike_elsewhere_is_found_whole() -> None:
    rng = random.Random(6)
    start, one, other = ("".join(rng.choices("defghijklmnop", k=100)) for _ in range(3))
    assert Verbatim(iter([start + one, start + other])).longest(start + other) == start + other


def test_passages_of_all_texts_have_one_length() -> None:
    long, short = [list(range(200))], [list(range(60)), list(range(50))]
    own, others = _passages([long, short], 10, None)
    assert {len(piece) for piece in (*own, *others)} == {48}
    assert [len(piece) for piece in _passages([long], 10, 70)[0]] == [64] * 3
    assert _passages([long, [[1, 2]]], 10, None) == [[], []]


def test_true_positives_by_hand() -> None:
    strangers = np.arange(2000.0)  # two of them may stand above
    assert true_positives(np.array([1997.5, 1996.5, 5.0]), strangers) == pytest.approx(1 / 3)
    assert true_positives(np.array([1.5, 3.0]), np.array([0.0, 2.0])) == 0.5  # of few strangers none may
