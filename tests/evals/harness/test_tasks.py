"""lm-evaluation-harness on our models: the same answers as its own `hf` model on the exported folder, in our tables."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidlm
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.evals.evaluated_model import EvaluatedModel
from braidlm.evals.formats.options import read_pairs
from braidlm.evals.harness.tasks import HarnessTask, open_harness, silenced
from braidlm.evals.scoring.scorer import Scorer
from tests.outcome import Outcome

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
PAIRS = [
    {"sentence_good": "The cats sleep.", "sentence_bad": "The cats sleeps."},
    {"sentence_good": "A dog runs.", "sentence_bad": "A dog run."},
    {"sentence_good": "Who ate it?", "sentence_bad": "Who ate?"},
    {"sentence_good": "ab ba", "sentence_bad": "ba ab"},
    {"sentence_good": "fedcba", "sentence_bad": "abcdef"},
]
BLIMP = {
    "output_type": "multiple_choice",
    "doc_to_text": "",
    "doc_to_target": 0,
    "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
    "num_fewshot": 0,
    "metric_list": [{"metric": "acc"}],
}
"""As tasks/blimp/_template_yaml of the harness, which begins each sentence with a space."""
TASKS = {
    "pairs": {**BLIMP, "target_delimiter": ""},
    "spaced": BLIMP,
    "choices": {
        **BLIMP,
        "doc_to_text": "Which is better?",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{(sentence_good + ' ') * 6}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "words": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{sentence_good}}",
        "doc_to_target": "{{' ' + sentence_bad}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{sentence_good}}",
        "doc_to_target": "{{sentence_bad}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def task_files(tmp_path: Path) -> Path:
    """Task files that read local data, a group of two, and one whose data is missing."""
    folder = tmp_path / "task_files"
    folder.mkdir()
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    for name, facts in [*TASKS.items(), ("nowhere", BLIMP)]:
        file = tmp_path / ("pairs.jsonl" if name != "nowhere" else "nowhere.jsonl")
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(file)}}}
        own = {"task": f"tiny_{name}", "validation_split": "validation", **data, **facts}
        (folder / f"{name}.yaml").write_text(json.dumps(own))  # JSON is YAML
    group = {
        "group": "tiny_group",
        "task": ["tiny_pairs", "tiny_spaced"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "group.yaml").write_text(json.dumps(group))
    return folder


@pytest.fixture
def folder(runs: Path) -> Path:
    return runs / "one" / "checkpoints" / "chck_2M"


def evaluated(folder: Path) -> EvaluatedModel:
    return EvaluatedModel(Scorer(load_model(folder)), load_tokenizer(folder))


def both(folder: Path) -> tuple[Any, Any]:
    """Our adapter, and the harness's own model on the exported folder."""
    pytest.importorskip("accelerate", reason="lm-evaluation-harness's hf model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    from braidlm.evals.harness.model import HarnessModel

    with silenced():
        theirs = HFLM(
            pretrained=str(folder),
            trust_remote_code=True,
            device="cpu",
            batch_size=3,
            dtype="float32",
            backend="causal",
        )
    return HarnessModel(evaluated(folder)), theirs


def test_continuations_longer_than_the_context_are_scored_and_counted(folder: Path) -> None:
    from braidlm.evals.harness.model import HarnessModel

    model = HarnessModel(evaluated(folder))
    context = model.evaluated.scorer.context
    assert context is not None
    found = model._loglikelihood_tokens([(("", ""), [1], [2] * (2 * context)), (("", ""), [1], [2])])
    assert found[0][0] < found[1][0] < 0
    assert model.too_long == {"shortened": 0, "in windows": 1}


def harness_instances(name: str, task_files: Path) -> list[Any]:
    task = open_harness(f"tiny_{name}", task_files).tasks[f"tiny_{name}"]
    return task.instances


def test_the_same_blimp_items_as_the_hf_model(folder: Path, task_files: Path) -> None:
    ours, theirs = both(folder)
    pairs = read_pairs(task_files.parent / "pairs.jsonl")
    own, _ = pairs.sums(ours.evaluated.scorer, ours.evaluated.tokenizer, begin="bos")
    differences = own[0::2] - own[1::2]
    instances = harness_instances("pairs", task_files)
    with silenced():
        found = theirs.loglikelihood(instances)
    sums = np.array([value for value, _ in found])
    assert differences == pytest.approx(sums[0::2] - sums[1::2], abs=1e-4)
    items = (sums[0::2] > sums[1::2]).tolist()
    assert 0 < sum(items) < len(items)
    assert (differences > 0).tolist() == items
    mine = ours.loglikelihood(instances)
    assert [value for value, _ in mine] == pytest.approx(sums, abs=1e-4)
    result = open_harness("tiny_pairs", task_files).evaluate("harness:tiny_pairs", ours.evaluated)
    assert result.score == pytest.approx(100 * np.mean(items))


@pytest.mark.parametrize("name", ["spaced", "choices", "words"])
def test_the_same_sums_and_greedy_flags_as_the_hf_model(name: str, folder: Path, task_files: Path) -> None:
    ours, theirs = both(folder)
    instances = harness_instances(name, task_files)
    with silenced():
        expected = theirs.loglikelihood(instances)
    found = ours.loglikelihood(instances)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected]


def test_the_same_long_texts_as_the_hf_model(folder: Path, task_files: Path) -> None:
    ours, theirs = both(folder)
    instances = harness_instances("text", task_files)
    assert max(len(ours.tok_encode(*instance.args)) for instance in instances) > ours.max_length
    with silenced():
        expected = theirs.loglikelihood_rolling(instances)
    assert ours.loglikelihood_rolling(instances) == pytest.approx(expected, abs=1e-3)


def test_the_same_writing_as_the_hf_model(folder: Path, task_files: Path) -> None:
    ours, theirs = both(folder)
    instances = harness_instances("writing", task_files)
    with silenced():
        expected = theirs.generate_until(instances)
    assert ours.generate_until(instances) == expected
    assert any(expected)


def test_how_texts_are_written_is_the_tasks_choice() -> None:
    from braidlm.evals.harness.model import generation_settings

    max_tokens, stops, sampling = generation_settings(
        {"until": "\n", "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9}
    )
    assert (max_tokens, stops, sampling.temperature, sampling.top_p) == (9, ["\n"], 0.7, 0.9)
    max_tokens, stops, sampling = generation_settings({"do_sample": False, "temperature": 0.7})
    assert (max_tokens, stops, sampling.temperature) == (256, [], 0.0)
    assert generation_settings({"do_sample": True})[2].temperature == 1.0


@pytest.mark.parametrize("name", [*TASKS])
def test_every_kind_of_task_has_a_result(name: str, folder: Path, task_files: Path) -> None:
    task = open_harness(f"tiny_{name}", task_files)
    result = task.evaluate(f"harness:tiny_{name}", evaluated(folder))
    assert (result.task, result.count, result.parts) == (f"harness:tiny_{name}", 5, {})
    percent = name not in ("text", "words")
    assert result.metric == {
        "choices": "acc_norm, %",
        "text": "word_perplexity",
        "words": "perplexity",
        "writing": "exact_match, %",
    }.get(name, "acc, %")
    assert result.higher_is_better == percent
    assert result.chance == (50 if name in ("pairs", "spaced", "choices") else None)
    also = {"choices": {"acc, %"}, "text": {"bits_per_byte"}, "words": {"acc, %"}}
    assert set(result.also) == also.get(name, set())
    assert task.about["metric"] == result.metric


def test_a_group_has_the_parts_of_its_tasks(folder: Path, task_files: Path) -> None:
    found = open_harness("tiny_group", task_files).evaluate("harness:tiny_group", evaluated(folder))
    each = {
        name: open_harness(name, task_files).evaluate(name, evaluated(folder)).score
        for name in ("tiny_pairs", "tiny_spaced")
    }
    assert {name: part.score for name, part in found.parts.items()} == each
    assert found.score == pytest.approx(sum(each.values()) / 2)
    assert found.count == 10


def test_the_command_puts_them_into_the_same_table(
    eval_verb: Callable[..., Outcome], runs: Path, data: Path, task_files: Path, tmp_path: Path
) -> None:
    harness = ("--harness", "tiny_pairs,tiny_writing", "--harness-tasks", task_files)
    shown = eval_verb(runs / "one", "blimp_fast", "--data", data, *harness, "--out", tmp_path / "out", "--quiet")
    assert (shown.code, shown.err) == (0, "")
    shown_tasks = {line.split()[0]: line.split()[1] for line in shown.out.splitlines() if len(line.split()) > 2}
    names = ("blimp_fast", "harness:tiny_pairs", "harness:tiny_writing")
    assert [shown_tasks[name] for name in names] == ["24", "5", "5"]
    facts = json.loads((tmp_path / "out" / "results.json").read_text())
    about = facts["tasks"]["harness:tiny_pairs"]
    assert about["metric"] == "acc, %"
    assert about["description"].startswith("lm-evaluation-harness 0.")
    alone = eval_verb(runs / "one", *harness, "--out", tmp_path / "out", "--json")
    assert set(alone.json()["tasks"]) == {"harness:tiny_pairs", "harness:tiny_writing"}, "nothing else is printed"
    assert len(list((tmp_path / "out" / "kept").glob("harness*"))) == 2


def test_what_is_kept_follows_what_is_asked(task_files: Path) -> None:
    before = open_harness("tiny_words", task_files).sha256
    assert open_harness("tiny_words", task_files).sha256 == before
    assert open_harness("tiny_words", task_files, shots=2).sha256 != before
    assert open_harness("tiny_pairs", task_files, shots=2).sha256 == open_harness("tiny_pairs", task_files).sha256


def test_what_people_get_wrong(folder: Path, task_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, **options: Any) -> HarnessTask:
        return open_harness(name, **{"folder": task_files, **options})

    monkeypatch.setattr("braidlm.evals.harness.tasks._manager", _without_the_harness_own_tasks())
    with pytest.raises(BraidError, match=r"lm-evaluation-harness has no task 'tiny_pair'\. Did you mean 'tiny_pairs'"):
        opened("tiny_pair")
    with pytest.raises(BraidError, match="there is no such folder of task files"):
        opened("tiny_pairs", folder=task_files / "nowhere")
    with pytest.raises(
        BraidError, match=r"this task of lm-evaluation-harness cannot be opened: .*nowhere\.jsonl"
    ) as found:
        opened("tiny_nowhere")
    assert found.value.where == "harness:tiny_nowhere"
    assert "--harness-tasks FOLDER" in str(found.value.todo)
    file = task_files / "pairs.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "unsafe_code": True}))
    with pytest.raises(BraidError, match="runs programs that the model writes, without a sandbox"):
        opened("tiny_pairs")
    with pytest.raises(BraidError, match="there is no task"):
        braidlm.eval(folder, [], device="cpu")


def _without_the_harness_own_tasks() -> Callable[[str | None, bool], Any]:
    """Its thousands of task files take ten seconds to read."""
    from braidlm.evals.harness import tasks as harness

    plain = harness._manager.__wrapped__
    return lambda folder, defaults: plain(folder, False)


def test_without_the_package(task_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BraidError, match="lm-evaluation-harness is not installed") as found:
        open_harness("tiny_pairs", task_files)
    assert "braidlm[eval]" in str(found.value.todo)
