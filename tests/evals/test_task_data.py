"""Data from the Hub by name: tried on local folders in the Hub's layout."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.task_data import fetch_from_hub, find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import HubSource
from tests.evals.choice_samples import HUB_ROWS
from tests.outcome import Outcome

pytest.importorskip("datasets", reason="the package 'datasets' is not installed")


def hub_folder(root: Path, configs: dict[str, dict[str, list[dict]]]) -> Path:
    """A data set as it is downloaded: a card that lists configurations, and parquet files of their splits."""
    import pyarrow
    from pyarrow import parquet

    card = ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = root / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


@pytest.fixture
def arc(tmp_path: Path) -> Path:
    easy = {"test": HUB_ROWS["arc_easy"], "train": HUB_ROWS["arc_easy"][:1]}
    return hub_folder(tmp_path / "ai2_arc", {"ARC-Easy": easy, "ARC-Challenge": {"test": HUB_ROWS["arc_easy"][:1]}})


def test_rows_are_those_of_the_tasks_configuration_and_split(arc: Path, tmp_path: Path) -> None:
    places = find_data(
        ["arc_easy", "arc_challenge"], tmp_path / "data", dict.fromkeys(("arc_easy", "arc_challenge"), f"hub:{arc}")
    )
    assert places["arc_easy"] == tmp_path / "data" / "hub" / "ai2_arc" / "ARC-Easy"
    rows = (places["arc_easy"] / "test.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == HUB_ROWS["arc_easy"]
    assert {name: TASKS[name]().open(place).count for name, place in places.items()} == {
        "arc_easy": 2,
        "arc_challenge": 1,
    }


def test_another_split_and_several(arc: Path, tmp_path: Path) -> None:
    place = fetch_from_hub(f"hub:{arc}:train", TASKS["arc_easy"].hub, tmp_path)
    assert [path.name for path in place.iterdir()] == ["train.jsonl"]
    splits = {"dev": [HUB_ROWS["mmlu"][0]] * 5, "test": HUB_ROWS["mmlu"]}
    folder = hub_folder(tmp_path / "mmlu", {"all": splits})
    place = fetch_from_hub(f"hub:{folder}", TASKS["mmlu_5shot"].hub, tmp_path)
    assert TASKS["mmlu_5shot"]().open(place).count == 2


def test_a_data_set_with_one_configuration_needs_no_name(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "piqa", {"plain": {"validation": HUB_ROWS["piqa"]}})
    place = fetch_from_hub(f"hub:{folder}", TASKS["piqa"].hub, tmp_path)
    assert TASKS["piqa"]().open(place).count == 1


def test_a_data_set_whose_configurations_are_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"sentence_good": "a b", "sentence_bad": "b a", "UID": name} for name in ("one", "two")]
    folder = hub_folder(tmp_path / "blimp", {"one": {"train": pairs[:1]}, "two": {"train": pairs[1:]}})
    place = fetch_from_hub(f"hub:{folder}", TASKS["blimp"].hub, tmp_path)
    assert place == tmp_path / "hub" / "blimp" / "all"
    assert sorted(path.name for path in place.iterdir()) == ["one.jsonl", "two.jsonl"]
    assert TASKS["blimp"]().open(place).count == 2
    row = {"prefix_acceptable": "A cat", "prefix_unacceptable": "A sock", "property_phrase": "can purr."}
    mixed = [{**row, "distraction_type": kind} for kind in ("before", "in-between")]
    folder = hub_folder(tmp_path / "comps", {"base": {"train": [row]}, "wugs_dist": {"train": mixed}})
    opened = TASKS["comps"]().open(fetch_from_hub(f"hub:{folder}", TASKS["comps"].hub, tmp_path))
    assert [item.of for item in opened.items] == ["base", "wugs_dist_before", "wugs_dist_in_between"]

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("datasets.get_dataset_config_names", lambda *args, **kwargs: ["one", "two"])
    monkeypatch.setattr("datasets.load_dataset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_from_hub("hub:", TASKS["blimp"].hub, tmp_path)
    assert not (tmp_path / "hub" / "nyu-mll--blimp" / "all").exists(), "half of a download is not taken for the whole"


def test_what_was_fetched_once_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.get_dataset_config_names", offline)
    source = TASKS["arc_easy"].hub
    with pytest.raises(BraidError, match=r"the Hub cannot be reached \(ConnectionError\)") as caught:
        fetch_from_hub("hub:", source, tmp_path)
    assert caught.value.where == "hub:allenai/ai2_arc"
    kept = tmp_path / "hub" / "allenai--ai2_arc" / "ARC-Easy" / "test.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("".join(json.dumps(row) + "\n" for row in HUB_ROWS["arc_easy"]))
    assert fetch_from_hub("hub:", source, tmp_path) == kept.parent
    with pytest.raises(BraidError, match="the Hub cannot be reached"):
        fetch_from_hub("hub:@main", source, tmp_path)


def test_what_people_get_wrong(arc: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="this task is not read from the Hub"):
        find_data(["bits_per_byte"], tmp_path, {"bits_per_byte": "hub:someone/text"})
    with pytest.raises(BraidError, match="this data set cannot be opened: Bad split: nosuch"):
        fetch_from_hub(f"hub:{arc}:nosuch", TASKS["arc_easy"].hub, tmp_path)
    with pytest.raises(BraidError, match="this data set cannot be opened: BuilderConfig 'other' not found"):
        fetch_from_hub(f"hub:{arc}", HubSource("x/y", "other"), tmp_path)


def test_on_the_command_line(
    eval_verb: Callable[..., Outcome], runs: Path, arc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = eval_verb(runs / "one", "arc_easy", "--data", f"arc_easy=hub:{arc}", "--quiet")
    assert (shown.code, shown.err) == (0, "")
    assert "arc_easy" in shown.out
    assert (tmp_path / "data" / "hub" / "ai2_arc" / "ARC-Easy" / "test.jsonl").is_file()
    missing = eval_verb(runs / "one", "piqa", "--data", tmp_path)
    assert missing.code == 2
    assert "`--data piqa=hub:` gets it from the Hub (`baber/piqa`)" in missing.err
