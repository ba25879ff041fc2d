"""lm-evaluation-harness's `local-completions`: the same items are right as in process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import Running

PAIRS = [
    ("The cats sleep.", "The cats sleeps."),
    ("A dog barks loudly.", "A dog bark loudly."),
    ("She sees herself.", "She sees himself."),
    ("Who did you see?", "Who did you see him?"),
    ("No child ever lies.", "Child no ever lies."),
    ("He has eaten it.", "He has ate it."),
    ("These books fell.", "This books fell."),
    ("I know that Tom left.", "I know that left Tom."),
]
TASK = """task: pairs
dataset_path: json
dataset_kwargs: {data_files: {train: FILE}}
output_type: multiple_choice
validation_split: train
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{[sentence_good, sentence_bad]}}"
num_fewshot: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of BLiMP's form."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    (folder / "pairs.yaml").write_text(TASK.replace("FILE", str(folder / "pairs.jsonl")))
    return folder


def items(task: Path, kind: str, **arguments: Any) -> list[tuple[list[float], float]]:
    """The log-probabilities of both sentences of every item, and whether it is right."""
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    pytest.importorskip("tenacity")
    manager = tasks.TaskManager(include_path=str(task), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=["pairs"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    samples = sorted(results["samples"]["pairs"], key=lambda sample: sample["doc_id"])
    return [([score[0] for score in sample["filtered_resps"]], sample["acc"]) for sample in samples]


def test_the_same_items_are_right_as_in_process(served: Running, plain_model: Path, task: Path) -> None:
    own = {
        "pretrained": str(plain_model),
        "trust_remote_code": True,
        "device": "cpu",
        "dtype": "float32",
        "batch_size": 4,
    }
    in_process = items(task, "hf", **own)
    address = {"base_url": f"{served.url}/v1/completions", "model": "plain", "tokenizer": str(plain_model)}
    over_http = items(
        task, "local-completions", **address, max_length=96, batch_size=3, num_concurrent=2, max_retries=1
    )
    assert len(over_http) == len(PAIRS)
    for (scores, right), (expected, was_right) in zip(over_http, in_process, strict=True):
        assert scores == pytest.approx(expected, abs=1e-3)
        assert right == was_right
    assert 0 < sum(right for _, right in over_http) < len(PAIRS)
