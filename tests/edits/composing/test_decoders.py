"""Folders of members: decoders of transformers of several architectures as one model."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer
from braidlm.inspection.one_text import token_routings
from braidlm.inspection.routes import routes
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.open import open_model
from braidlm.serving.switches import PartSwitches, Switches
from braidlm.training.features.distill.teachers import DistillConfig, TeacherConfig, Teachers, find_teachers
from braidlm.training.train import train
from tests.outcome import Outcome
from tests.tiny_decoders import save_decoder, save_gates
from tests.tiny_models import random_ids
from tests.without_braid import run_without_braid

KINDS = ("llama", "gpt2", "qwen2", "mixtral")
SAVED = (
    "README.md",
    "config.json",
    "generation_config.json",
    "lineage.json",
    "model.safetensors",
    "modeling_members.py",
)
ALONE = """
import torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
less = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, paths=["gpt2"])
made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
torch.save({"logits": model(ids).logits, "less": less(ids).logits, "made": made}, folder + "/computed")
model.save_pretrained(folder + "/again")
again = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
assert half.dtype == torch.bfloat16 and half(ids).logits.isfinite().all()
"""


@pytest.fixture(scope="module")
def home(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoders of four architectures, and the folder that they make together."""
    folder = tmp_path_factory.mktemp("members")
    for name in KINDS:
        save_decoder(name, stories / "tokenizer", folder / name)
    compose([folder / name for name in KINDS], folder / "all", join="posterior")
    return folder


@torch.no_grad()
def test_plain_transformers_opens_the_folder(home: Path, tmp_path: Path) -> None:
    ids = random_ids(2, 9, vocab_size=300)
    torch.save(ids, tmp_path / "ids")
    run_without_braid(ALONE, home / "all", tmp_path / "ids")
    computed = torch.load(home / "all" / "computed", weights_only=True)
    model = open_model(home / "all").load()
    torch.testing.assert_close(computed["logits"], model(ids).logits, rtol=0, atol=1e-5)
    alone = open_model(home / "gpt2", "own").load()(ids).logits.log_softmax(-1)
    torch.testing.assert_close(computed["less"], alone, rtol=0, atol=1e-5)
    made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
    assert torch.equal(computed["made"], made)


def test_the_folder_says_what_it_is_made_of(home: Path, braid: Callable[..., Outcome]) -> None:
    assert all((home / "all" / name).is_file() for name in SAVED)
    lineage = load_lineage(home / "all")
    assert lineage is not None
    assert [(one["name"], one["format"]) for one in lineage["sources"]] == list(zip(KINDS, KINDS, strict=True))
    assert lineage["options"]["join"] == {"kind": "posterior", "window": None, "settle": None}
    shown = braid("show", home / "all")
    assert "llama (llama), gpt2 (gpt2), qwen2 (qwen2), mixtral (mixtral)" in shown.out
    assert "paths=['llama']" in (home / "all" / "README.md").read_text()


@torch.no_grad()
def test_evaluation_and_generation_take_it(home: Path, braid: Callable[..., Outcome]) -> None:
    model, rows = open_model(home / "all").load(), random_ids(2, 20, vocab_size=300)
    wanted = model(rows).logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])
    scores = Scorer(model).score([Request(row) for row in rows.tolist()])
    assert scores.tokens == pytest.approx(wanted.flatten().numpy(), abs=1e-5)
    said = braid("generate", home / "all", "Once upon", "--max-tokens", 3, "--paths", "llama", "--greedy")
    alone = braid("generate", home / "llama", "Once upon", "--max-tokens", 3, "--greedy")
    assert said.out.split("\n(")[0] == alone.out.split("\n(")[0]
    refused = braid("generate", home / "all", "Once", "--paths", "lama")
    assert "the model has no path 'lama'. Did you mean 'llama'?" in refused.err


@torch.no_grad()
def test_a_server_switches_members(home: Path) -> None:
    model, ids = open_model(home / "all").load(), random_ids(1, 5, vocab_size=300)
    before, parts = model(ids).logits, PartSwitches(model)
    parts.apply(Switches(paths=("gpt2", "qwen2")))
    assert model.active == ["gpt2", "qwen2"]
    parts.apply(Switches())
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_who_speaks_after_each_token(home: Path, tmp_path: Path) -> None:
    """The shares are what Bayes' rule makes of how well each member alone predicted the text so far."""
    model, text = open_model(home / "all").load(), "Once upon a time there was a cat."
    ids = open_model(home / "all").tokenizer.encode(text)
    alone = torch.stack([open_model(home / name).load()(torch.tensor([ids])).logits[0] for name in KINDS])
    said = alone.double().log_softmax(-1)[:, :-1].gather(-1, torch.tensor(ids[1:]).expand(len(KINDS), -1)[..., None])
    wanted = torch.nn.functional.pad(said[..., 0].cumsum(-1), (1, 0)).softmax(0).T
    (layer,) = token_routings(model, ids)
    assert (layer.kind, layer.choices) == ("members", list(KINDS))
    torch.testing.assert_close(torch.tensor(layer.weights, dtype=torch.float64), wanted, atol=1e-4, rtol=0)
    (of_text,) = routes(home / "all", [text], out=tmp_path / "routes", device="cpu").models
    assert [next(iter(token)) for token in of_text.prompts[0].view.served[0]] == [KINDS[row[0]] for row in layer.chosen]
    parts = PartSwitches(model)
    parts.apply(Switches(paths=("gpt2", "qwen2")))
    (layer,) = token_routings(model, ids)
    assert all(row[0] == row[3] == 0 and abs(sum(row) - 1) < 1e-3 for row in layer.weights)


def test_fixed_shares_have_nothing_to_look_at(home: Path, tmp_path: Path) -> None:
    fixed = compose([home / "llama", home / "gpt2"], tmp_path / "fixed", join="average")
    with pytest.raises(BraidError, match="the same for every token"):
        routes(fixed, ["Once"], device="cpu")


@torch.no_grad()
def test_members_teach(home: Path) -> None:
    opened = open_model(home / "all", "own")
    (teacher,) = find_teachers(DistillConfig([TeacherConfig(str(home / "all"))]), opened.tokenizer, 32)
    model, ids = teacher.load(torch.device("cpu"), torch.float32), random_ids(2, 9, vocab_size=300)
    teachers = Teachers([model], [1.0], 300, temperature=1.0)
    wanted = opened.load()(ids).logits[..., :300].log_softmax(-1)
    torch.testing.assert_close(teachers.log_probabilities(ids), wanted)
    torch.testing.assert_close(teachers.log_probabilities(ids, 5), wanted[:, 5:])
    assert teachers.widths == [4 * 16]


def shares(count: int, gone: int | None = None) -> dict[str, Any]:
    return {"kind": "mixture", "shares": [0.1 * (number + 1) for number in range(count) if number != gone]}


JOINS: dict[str, Callable[..., Any]] = {
    "average": lambda *_: "average",
    "posterior": lambda *_: {"kind": "posterior", "window": 4},
    "settle": lambda *_: {"kind": "posterior", "settle": 8},
    "mixture": shares,
}


@given(gone=st.integers(0, 2), join=st.sampled_from(sorted(JOINS)))
@settings(max_examples=3)
def test_a_withdrawn_member_was_never_there(home: Path, gone: int, join: str) -> None:
    """Bit for bit: the weights and the configuration are those of the folder composed without it."""
    with TemporaryDirectory() as scratch:
        out, others = Path(scratch), [home / name for name in KINDS[:3]]
        compose(others, out / "all", join=JOINS[join](3))
        compose([*others[:gone], *others[gone + 1 :]], out / "wanted", join=JOINS[join](3, gone))
        edit("withdraw", out / "all", out / "found", paths=(KINDS[gone],))
        for name in (
            "model.safetensors",
            "config.json",
            "generation_config.json",
            "modeling_members.py",
            "tokenizer.json",
        ):
            assert (out / "found" / name).read_bytes() == (out / "wanted" / name).read_bytes(), name


@torch.no_grad()
def test_the_last_member_is_the_decoder_that_it_was(home: Path, tmp_path: Path) -> None:
    made = edit("withdraw", home / "all", tmp_path / "one", paths=("llama", "gpt2", "qwen2"))
    assert made is not None
    before, after = (OpenedDecoder(folder) for folder in (home / "mixtral", made))
    assert (after.kind, [path.name for path in made.glob("*.py")]) == ("mixtral", [])
    ids = random_ids(2, 9, vocab_size=300)
    assert torch.equal(before.load()(ids).logits, after.load()(ids).logits)
    config = {"architectures", "dtype", "hidden_size", "model_type", "num_local_experts", "vocab_size"}
    own, other = (json.loads((folder / "config.json").read_text()) for folder in (home / "mixtral", made))
    assert {key: own[key] for key in config} == {key: other[key] for key in config}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": ("lama",)}, r"the model has no member 'lama'\. Did you mean 'llama'"),
        ({"paths": KINDS}, "at least one must stay\nThere are llama, gpt2, qwen2, mixtral"),
        ({"modules": ("x*",)}, "members have no inserted modules"),
    ],
)
def test_what_cannot_be_withdrawn(home: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match=message):
        edit("withdraw", home / "all", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_a_member(home: Path, stories: Path, tmp_path: Path) -> None:
    def refused(*folders: Path, **options: Any) -> str:
        with pytest.raises(BraidError) as caught:
            compose(folders, tmp_path / "out", **{"join": "average", **options})
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    llama, gpt2 = home / "llama", home / "gpt2"
    bytes_tokenizer().save(save_decoder("qwen2", stories / "tokenizer", tmp_path / "bytes"))
    gates = save_gates(llama, tmp_path / "gates")
    assert "'llama' and 'bytes' have different tokenizers" in refused(llama, tmp_path / "bytes")
    assert "two paths are called 'same'" in refused(llama, gpt2, names=["same", "same"])
    assert "this path is listed twice" in refused(llama, llama)
    assert "'all' has members itself: llama, gpt2, qwen2, mixtral" in refused(llama, home / "all")
    assert "'gates' has gates, whose code a folder of members does not carry" in refused(gpt2, gates)
    assert "with this join models stay as they are: freeze cannot be chosen" in refused(llama, gpt2, freeze=["paths"])
    mixture = refused(llama, gpt2, join="mixture")
    assert "the shares of decoders of transformers are given" in mixture
    assert "{kind: mixture, shares: [0.5, 0.5]}" in mixture
    three = {"kind": "mixture", "shares": [0.2, 0.3, 0.5]}
    assert "3 shares were given for 2 models" in refused(llama, gpt2, join=three)


def test_a_dry_run_writes_nothing(home: Path, tmp_path: Path, braid: Callable[..., Outcome]) -> None:
    out = tmp_path / "out"
    said = braid("compose", home / "llama", home / "gpt2", "--join", "posterior", "--out", out, "--dry-run")
    assert said.code == 0
    assert "Compose llama + gpt2 as members of one model, join posterior" in said.out
    assert braid("edit", "withdraw", home / "all", "--paths", "gpt2", "--out", out, "--dry-run").code == 0
    assert not out.exists()


def test_members_are_not_trained_together(home: Path, stories: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "run",
        "out": str(tmp_path),
        "decoder": str(home / "all"),
        "data": {"sets": {"own": {"path": str(stories)}}},
    }
    with pytest.raises(BraidError, match="members \\(llama, gpt2, qwen2, mixtral\\) are not trained together"):
        train({**recipe, "training": {"budget": "1 steps"}}, device="cpu")
    with pytest.raises(BraidError, match="this is a model of several decoders"):
        edit("gate", home / "all", tmp_path / "gated")
