"""What our tasks ask is what lm-evaluation-harness asks, to the character, from the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from braidlm.evals.harness.tasks import silenced
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.text import detokenized, words
from tests.evals.choice_samples import HUB_ROWS

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
FILES = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml",
    "mmlu_continuation": "mmlu/continuation/mmlu_abstract_algebra.yaml",
    "wikitext2": "wikitext/wikitext.yaml",
}


def their_task(name: str, folder: Path, shots: int = 0) -> Any:
    """The harness's own task file, reading our rows."""
    from lm_eval.tasks import TaskManager

    rows, dev = folder / "rows.jsonl", folder / "dev.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in HUB_ROWS[name]))
    dev.write_text("".join(json.dumps(HUB_ROWS[name][number % len(HUB_ROWS[name])]) + "\n" for number in range(5)))
    splits = {"train": str(rows), "dev": str(dev), "validation": str(rows), "test": str(rows)}
    path = Path(lm_eval.__file__).parent / "tasks" / FILES[name]
    task_file = {
        "include": str(path),
        "task": f"our_{name}",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": splits},
        "num_fewshot": shots,
    }
    (folder / "task.yaml").write_text(json.dumps(task_file))  # JSON is YAML
    with silenced():
        loaded = TaskManager(include_path=str(folder), include_defaults=False).load([f"our_{name}"])
        task = loaded["tasks"][f"our_{name}"]
        task.set_fewshot_seed(1234)
        task.build_all_requests()
    return task


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("lambada", "wikitext2")])
def test_options_are_those_of_the_harness(name: str, tmp_path: Path) -> None:
    task = their_task(name, tmp_path)
    questions = TASKS[name]().open(tmp_path / "rows.jsonl").items
    ours = [option for question in questions for option in question.options]
    assert ours == [instance.args for instance in task.instances]
    golds = [task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc) for doc in task.eval_docs]
    assert [question.answer for question in questions] == [int(gold) for gold in golds]


def test_examples_before_a_question_are_those_of_the_harness(tmp_path: Path) -> None:
    task = their_task("mmlu", tmp_path, shots=5)
    (tmp_path / "rows.jsonl").rename(tmp_path / "test.jsonl")
    questions = TASKS["mmlu_5shot"]().open(tmp_path).items
    ours = [option for question in questions for option in question.options]
    assert ours == [instance.args for instance in task.instances]
    assert ours[0][0].count("Answer: ") == 5


def test_last_words_are_those_of_the_harness(tmp_path: Path) -> None:
    task = their_task("lambada", tmp_path)
    passages = TASKS["lambada"]().open(tmp_path / "rows.jsonl").items
    assert passages == [instance.args for instance in task.instances]


def test_pages_are_those_of_the_harness(tmp_path: Path) -> None:
    task = their_task("wikitext2", tmp_path)
    (pages,) = TASKS["wikitext2"]().open(tmp_path / "rows.jsonl").splits.values()
    assert [detokenized(page) for page in pages] == [instance.args[0] for instance in task.instances]
    counts = [task.process_results({"page": page}, [-1.0])["word_perplexity"][1] for page in pages]
    assert [words(page) for page in pages] == counts
