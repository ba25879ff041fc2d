"""The prompt study: several models continue the same prompts, side by side."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from braidlm.core.decoding.generation import NextToken, Prompt
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import save_model
from braidlm.core.report.page import html
from braidlm.core.report.rendering import FORMATS, csv_text, markdown
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.inspection.generate import (
    Continuation,
    Generation,
    PromptStudy,
    generate,
    next_rows,
    predictions,
    prompt_study,
    study_report,
)
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import ToyTokenizer, randomised, tiny_config

PROMPTS = [
    {"prompt": "Once upon a time", "domain": "stories"},
    {"prompt": "Solve this:", "domain": "maths", "name": "Task"},
    {"prompt": "A line,\nand another"},
]


@pytest.fixture(scope="session")
def made_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with different tokenizers; the second has two paths."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = bytes_tokenizer()
    plain = randomised(BraidForCausalLM(tiny_config(tokenizer.vocab_size)), seed=1)
    parallel = {"parallel": {"paths": ["stories", "maths"]}}
    words = ToyTokenizer()
    paths = randomised(BraidForCausalLM(tiny_config(words.vocab_size, stages=[parallel], positions="learned")), seed=2)
    return (
        save_model(plain, folder / "plain", tokenizer, {"made_by": "a test"}),
        save_model(paths, folder / "paths", words, {"made_by": "a test"}),
    )


@pytest.fixture
def pair(made_pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies, which a test may damage."""
    return tuple(Path(shutil.copytree(model, tmp_path / model.name)) for model in made_pair)  # type: ignore[return-value]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return path


def test_every_prompt_has_a_block_with_every_model(braid, pair: tuple[Path, Path], prompts: Path):
    shown = braid("generate", "--prompts", prompts, "--models", *pair, "--greedy", "--max-tokens", 4, "--quiet")
    assert shown.code == 0, shown.err
    headings = ("1. Once upon a time\nDomain: stories", "2. Task: Solve this:\nDomain: maths", "3. A line, and another")
    positions = [shown.out.index(heading) for heading in headings]
    assert positions == sorted(positions)
    assert shown.out.count("  plain:\n") == shown.out.count("  paths:\n") == 3
    assert shown.out.count("    next token predictions: ") == 6
    for model in pair:
        result = generate(model, [line["prompt"] for line in PROMPTS], max_tokens=4, greedy=True, top_next=3)
        for text in result.texts:
            assert "\n".join(f"    {t}".rstrip() for t in (text.prompt + text.text).split("\n")) in shown.out
            assert f"next token predictions: {predictions(text.next)}\n" in shown.out


def test_facts_for_programs_are_the_functions(braid, pair: tuple[Path, Path], prompts: Path):
    options = ("--seed", 4, "--max-tokens", 6, "--top-next", 2, "--json")
    facts = braid("generate", "--prompts", prompts, "--models", *pair, *options).json()
    study = prompt_study(pair, prompts, seed=4, max_tokens=6, top_next=2)
    assert list(facts["models"]) == list(study.models) == ["plain", "paths"]
    assert [(p["text"], p["domain"]) for p in facts["prompts"]] == [(p["prompt"], p.get("domain")) for p in PROMPTS]
    for name, made in study.models.items():
        assert [t["text"] for t in facts["models"][name]["texts"]] == [t.text for t in made.texts]
        assert all(len(text.next) == 2 for text in made.texts)
    alone = generate(pair[0], [p["prompt"] for p in PROMPTS], seed=4, max_tokens=6)
    assert [t.text for t in study.models["plain"].texts] == [t.text for t in alone.texts]


def test_plain_lines_are_prompts_too(braid, pair: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("Once\n\n  indented\n")
    study = prompt_study(pair[:1], tmp_path / "prompts.txt", max_tokens=1)
    assert [prompt.text for prompt in study.prompts] == ["Once", "  indented"]
    assert [prompt.text for prompt in prompt_study(pair[:1], ["a", "b"], max_tokens=1).prompts] == ["a", "b"]


def test_a_seed_or_greed_makes_it_the_same_again(pair: tuple[Path, Path], prompts: Path):
    for options in ({"seed": 1}, {"greedy": True}):
        first, second = (prompt_study(pair, prompts, max_tokens=8, **options) for _ in range(2))
        assert [m.texts for m in first.models.values()] == [m.texts for m in second.models.values()]
    other = prompt_study(pair, prompts, max_tokens=8, seed=2)
    assert other.models["plain"].texts != prompt_study(pair, prompts, max_tokens=8, seed=1).models["plain"].texts


def test_models_are_at_work_one_after_another(braid, pair: tuple[Path, Path], prompts: Path):
    names: list[str] = []
    prompt_study(pair, prompts, max_tokens=1, on_model=names.append)
    assert names == ["plain", "paths"]
    assert braid("generate", "--prompts", prompts, "--models", *pair, "--max-tokens", 1).out.startswith(
        "plain ...\npaths ...\n"
    )


def test_paths_can_be_silenced_in_a_study(pair: tuple[Path, Path], prompts: Path):
    whole, one_path = (
        prompt_study(pair[1:], prompts, max_tokens=4, greedy=True, paths=p).models["paths"] for p in (None, ["maths"])
    )
    assert one_path.paths == ["maths"]
    assert [t.next for t in whole.texts] != [t.next for t in one_path.texts]


def made_study() -> PromptStudy:
    """One with everything that a form could stumble over."""
    tokens = [NextToken(1, " girl", 0.9951), NextToken(2, " a,b", 0.004), NextToken(3, "\n", 0.0001)]
    study = PromptStudy([Prompt("A *little* <b>", "stories"), Prompt("1 + 1")])
    for name in ("llama_256", "both"):
        texts = [Continuation("A *little* <b>", ' girl,\nand "more"', 5, "end", tokens), Continuation("1 + 1", "")]
        study.models[name] = Generation(f"models/{name}", "cpu", texts=texts)
    return study


def test_predictions_read_as_in_the_paper():
    assert predictions([NextToken(1, " girl", 0.995), NextToken(2, " boy", 0.005)]) == "girl 99.5%, boy 0.5%"
    assert predictions(made_study().models["both"].texts[0].next) == "girl 99.5%, ' a,b' 0.4%, '\\n' <0.1%"
    assert predictions([]) == ""


def test_markdown():
    text = markdown(study_report(made_study()))
    assert "## 1. A \\*little\\* \\<b\\>\n\nDomain: stories\n\n**llama_256**\n\n" in text
    assert '> A \\*little\\* \\<b\\> girl,  \n> and "more"  \n\nnext token predictions: girl 99.5%' in text
    assert text.count("## ") == 2
    assert text.count("next token predictions") == 2


def test_a_page():
    page = html(study_report(made_study()))
    assert '<h2 id="1-a-little-b">1. A *little* &lt;b&gt;</h2>' in page
    assert page.count("<blockquote>") == 4
    assert "llama_256, next token predictions: girl 99.5%" in page
    assert page.count("<table>") == 1, "the second prompt has no predictions"
    assert "<b>" not in page


def test_next_tokens_of_all_models_side_by_side():
    texts = {
        "a": Continuation("x", next=[NextToken(1, " girl", 0.6), NextToken(2, " boy", 0.3)]),
        "b": Continuation("x", next=[NextToken(2, " boy", 0.9), NextToken(3, "\n", 0.05)]),
    }
    assert next_rows(texts) == [["boy", "30.0%", "90.0%"], ["girl", "60.0%", None], ["'\\n'", None, "5.0%"]]


def test_a_table():
    rows = list(csv.DictReader(io.StringIO(csv_text(study_report(made_study()).tables[0]), newline="")))
    assert len(rows) == 4
    assert rows[0]["prompt"] == "A *little* <b>"
    assert rows[0]["continuation"] == ' girl,\nand "more"'
    assert (rows[0]["model"], rows[1]["model"], rows[0]["domain"]) == ("llama_256", "both", "stories")
    assert (rows[0]["next_1"], rows[0]["probability_1"], rows[0]["next_3"]) == (" girl", "0.995100", "\n")
    assert rows[2]["next_1"] == ""


@pytest.mark.parametrize("ending", ["md", "html", "csv"])
def test_a_report_is_written(braid, pair: tuple[Path, Path], prompts: Path, tmp_path: Path, ending: str):
    out = tmp_path / "reports" / f"study.{ending}"
    options = ("--seed", 1, "--max-tokens", 2, "--out", out)
    shown = braid("generate", "--prompts", prompts, "--models", *pair, *options)
    assert f"Written to {out}." in shown.out
    report = study_report(prompt_study(pair, prompts, seed=1, max_tokens=2))
    assert out.read_bytes().decode() == FORMATS[f".{ending}"](report)


def test_models_are_told_apart(run_folder: Path, pair: tuple[Path, Path]):
    study = prompt_study([run_folder, *(run_folder / "checkpoints").glob("step-*"), pair[0]], ["a"], max_tokens=1)
    assert sorted(study.models) == ["plain", "run", "run/step-10", "run/step-9"]
    with pytest.raises(BraidError, match="this model is given twice"):
        prompt_study([pair[0], f"{pair[1]}/../plain"], ["a"])
    with pytest.raises(BraidError, match="there is no model"):
        prompt_study([], ["a"])


FORMS = "Either `braid generate MODEL PROMPT ...`, or `braid generate --prompts FILE --models MODEL ...`."


def test_one_form_or_the_other(braid, pair: tuple[Path, Path], prompts: Path):
    model = pair[0]
    both = "a model or a prompt is given, and a prompt study (--prompts, --models) too"
    cases = {
        both: [
            ("generate", model, "a", "--prompts", prompts, "--models", model),
            ("generate", model, "a", "--prompts", prompts),
            ("generate", model, "--models", model),
        ],
        "there is no model and no prompt": [("generate",), ("generate", "--greedy"), ("generate", "--out", "x.md")],
        "a prompt study also needs --models MODEL ...": [("generate", "--prompts", prompts)],
        "a prompt study also needs --prompts FILE": [("generate", "--models", *pair)],
        "--out writes the report of a prompt study": [("generate", model, "a", "--out", "x.md")],
    }
    for text, commands in cases.items():
        for command in commands:
            shown = braid(*command)
            assert (shown.code, shown.out, shown.err) == (2, "", f"error: {text}\n{FORMS}\n")
    shown = braid("generate", model)
    assert (shown.code, shown.err.splitlines()[0]) == (2, "error: there is no prompt")


def test_everything_is_checked_before_the_first_model_works(
    braid, pair: tuple[Path, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was at work")

    monkeypatch.setattr("braidlm.opening.opened_model.OpenedModel.load", never)
    out = tmp_path / "study.md"
    long = tmp_path / "long.txt"
    long.write_text("w1 " * 40)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"promt": "a"}\n')
    (tmp_path / "folder.md").mkdir()
    models = ("--models", *pair)
    cases = [
        (("--prompts", tmp_path / "none.jsonl", *models), "there is no such file of prompts"),
        (("--prompts", bad, *models), f"{bad}, line 1: there is no 'prompt'."),
        (("--prompts", prompts, *models, tmp_path / "none"), "there is no such folder"),
        (("--prompts", prompts, *models, pair[0]), "this model is given twice"),
        (("--prompts", long, *models), "has 40 tokens, and the model's limit is 32"),
        (("--prompts", prompts, *models, "--paths", "stories"), "plain: this model has no paths to choose from"),
        (("--prompts", prompts, "--models", pair[1], "--paths", "x"), "paths: the model has no path 'x'."),
        (("--prompts", prompts, *models, "--top-k", "0"), "argument --top-k: expected a whole number from 1 to"),
        (("--prompts", prompts, *models, "--max-tokens", "0"), "argument --max-tokens: expected a whole number"),
        (("--prompts", prompts, *models, "--top-next", "-1"), "argument --top-next: expected a whole number from 0 to"),
        (("--prompts", prompts, *models, "--out", "x.docx"), "x.docx: a report ends in .md, .html, .csv"),
        (("--prompts", prompts, *models, "--out", tmp_path / "folder.md"), "folder.md: this is a folder"),
    ]
    for arguments, text in cases:
        shown = braid("generate", *arguments, *(() if "--out" in arguments else ("--out", out)))
        assert (shown.code, shown.out) == (2, ""), arguments
        assert text in shown.err, arguments
        assert not out.exists()
    (pair[1] / "model.safetensors").write_bytes(b"damaged")
    shown = braid("generate", "--prompts", prompts, *models, "--out", out)
    assert (shown.code, out.exists()) == (2, False)
    assert "paths: model.safetensors is damaged" in shown.err
