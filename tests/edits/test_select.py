"""Selecting gates: the rules, what they leave, and that nothing else changes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.edits.select import RULES, judge
from braidlm.opening.gating import gates_of, without
from tests.edits.small_models import text_file
from tests.report_pages import charts_of
from tests.tiny_models import random_ids, tiny_model

SIZES = {2: 0.0, 3: 0.002, 4: 0.5, 5: -0.4, 6: 0.3}
"""The factors of scalar gates, by layer."""
CHANGES = st.dictionaries(st.integers(2, 40), st.floats(-5, 5) | st.just(0.0), min_size=1)


@torch.no_grad()
def gated_folder(out: Path, sizes: dict[int, float] | None = None, kind: Any = "scalar", **architecture: Any) -> Path:
    """A model of six blocks, whose gates have these sizes."""
    sizes, tokenizer = SIZES if sizes is None else sizes, bytes_tokenizer()
    gates = {"kind": kind, "layers": list(sizes)}
    stages = architecture.pop("stages", [{"block": {"layers": 6}}])
    model = tiny_model(vocab_size=tokenizer.vocab_size, stages=stages, gates=gates, **architecture)
    for number, gate in gates_of(model).items():
        for parameter in gate.parameters():
            parameter.copy_(sizes[number] * torch.ones_like(parameter))
    return save_model(model, out, tokenizer, {"made_by": "test"})


def changes_of(folder: Path) -> dict[int, float]:
    lineage = load_lineage(folder)
    assert lineage is not None
    return {one["layer"]: one["change"] for one in lineage["measured"]["layers"]}


@given(CHANGES, st.sampled_from(list(RULES)), st.none() | st.floats(0, 0.99))
def test_a_threshold_parts_those_that_stay_from_those_that_go(
    changes: dict[int, float], rule: Any, threshold: float | None
) -> None:
    _, _, default = RULES[rule]
    share = default if threshold is None else threshold
    wanted = {"smallest-change": abs, "only-if-helps": lambda x: -x, "as_printed": lambda x: x}[rule]
    largest = max(map(wanted, changes.values()))
    stays = {verdict.layer for verdict in judge(changes, rule, threshold=threshold) if verdict.stays}
    assert stays == {layer for layer, change in changes.items() if wanted(change) > max(0.0, share * largest)}
    assert stays or largest <= 0, "only gates that do nothing of what the rule wants all go"


@given(CHANGES, st.sampled_from(list(RULES)), st.integers(0, 12))
def test_the_best_are_kept(changes: dict[int, float], rule: Any, keep: int) -> None:
    verdicts, (_, in_favour, _) = judge(changes, rule, keep), RULES[rule]
    assert [verdict.layer for verdict in verdicts] == list(changes)
    stays = [in_favour(changes[verdict.layer]) for verdict in verdicts if verdict.stays]
    goes = [in_favour(changes[verdict.layer]) for verdict in verdicts if not verdict.stays]
    assert len(stays) == min(keep, sum(in_favour(change) > 0 for change in changes.values()))
    assert all(score > 0 for score in stays)
    assert not stays or all(score <= min(stays) for score in goes)


@given(CHANGES)
def test_the_printed_rule_is_the_opposite_of_what_helps(changes: dict[int, float]) -> None:
    helps, printed = (
        {verdict.layer for verdict in judge(changes, rule) if verdict.stays} for rule in ("only-if-helps", "as_printed")
    )
    assert not helps & printed
    assert helps | printed == {layer for layer, change in changes.items() if change}


def test_gates_of_little_change_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = gated_folder(tmp_path / "source")
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), report=str(tmp_path / "report"))
    shown = capsys.readouterr().out
    assert "Select gates of source by smallest-change: 2 of 5 go (layers 2 to 3)" in shown
    assert "changes nothing" in shown
    assert "does not change the perplexity by more than 0.0" in shown
    before, after = load_model(source), load_model(tmp_path / "out")
    assert list(gates_of(after)) == [4, 5, 6]
    assert after.config.architecture["gates"]["layers"] == [4, 5, 6]
    gone = {f"model.stages.0.layers.{n}.gate.weight": "its gate goes" for n in (1, 2)}
    old, new = before.state_dict(), after.state_dict()
    assert new.keys() == old.keys() - gone.keys()
    assert all(torch.equal(tensor, old[name]) for name, tensor in new.items())
    ids = random_ids(2, 12)
    with torch.no_grad(), without(before, [2, 3]):
        assert torch.equal(before(ids).logits, after(ids).logits)
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    measured = lineage["measured"]
    assert measured["before"]["bits_per_byte"] != measured["after"]["bits_per_byte"]
    assert [one["layer"] for one in measured["layers"] if not one["stays"]] == [2, 3]
    assert lineage["left_out"]["model"] == gone
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "select.html",
        "layers.csv",
    }
    assert set(charts_of(tmp_path / "report" / "select.html")) == {"perplexity", "change"}
    with (tmp_path / "report" / "layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["stays"]) for row in rows] == [
        ("2", "false"), ("3", "false"), ("4", "true"), ("5", "true"), ("6", "true"),
    ]  # fmt: skip
    assert float(rows[2]["change"]) == pytest.approx(changes_of(tmp_path / "out")[4], rel=1e-4)


def test_every_gate_before_a_layer_goes(tmp_path: Path) -> None:
    source = gated_folder(tmp_path / "source")
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), before=5)
    assert list(gates_of(load_model(source))) == [2, 3, 4, 5, 6]
    assert list(gates_of(load_model(tmp_path / "out"))) == [5, 6]


def test_selecting_twice_never_renumbers(tmp_path: Path) -> None:
    source, text = gated_folder(tmp_path / "source"), str(text_file(tmp_path))
    edit("select", source, tmp_path / "three", text=text, keep=3)
    edit("select", tmp_path / "three", tmp_path / "two", text=text, keep=2)
    three, two = (list(gates_of(load_model(tmp_path / name))) for name in ("three", "two"))
    assert len(three) == 3
    assert len(two) == 2
    assert set(two) < set(three) <= {4, 5, 6}


@pytest.mark.parametrize("rule", ["only-if-helps", "as_printed"])
def test_rules_by_sign(tmp_path: Path, rule: str) -> None:
    source, text = gated_folder(tmp_path / "source"), str(text_file(tmp_path))
    edit("select", source, tmp_path / "out", text=text, rule=rule)
    sign = 1 if rule == "as_printed" else -1
    changes = changes_of(tmp_path / "out")
    assert changes[2] == 0.0
    kept = list(gates_of(load_model(tmp_path / "out")))
    assert kept == [layer for layer, change in changes.items() if sign * change > 0]
    assert 0 < len(kept) < 4


@pytest.mark.parametrize("kind", ["vector", "scalar", "matrix", {"kind": "matrix", "bias": True}], ids=str)
def test_a_gate_that_never_moved_goes_without_changing_a_logit(tmp_path: Path, kind: Any) -> None:
    source = gated_folder(tmp_path / "source", {2: 0.0, 4: 0.3, 5: 0.0}, kind)
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), threshold=0)
    before, after = load_model(source), load_model(tmp_path / "out")
    assert list(gates_of(after)) == [4]
    ids = random_ids(2, 16)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)


def test_all_gates_go_only_if_asked_for(tmp_path: Path) -> None:
    source, text = gated_folder(tmp_path / "source", {2: 0.0, 3: 0.0}), str(text_file(tmp_path))
    with pytest.raises(BraidError, match="every gate would go: none has moved from zero") as error:
        edit("select", source, tmp_path / "out", text=text)
    assert "`--keep 0`" in str(error.value.todo)
    moved, alone = gated_folder(tmp_path / "moved"), gated_folder(tmp_path / "alone", {6: 0.3})
    helps = changes_of(edit("select", alone, tmp_path / "kept", text=text) or tmp_path)[6] < 0
    with pytest.raises(BraidError, match=r"every gate would go: none meets it \(the largest change is [+-]\d"):
        edit("select", alone, tmp_path / "out", text=text, rule="as_printed" if helps else "only-if-helps")
    assert not (tmp_path / "out").exists()
    edit("select", moved, tmp_path / "out", text=text, keep=0)
    plain = load_model(tmp_path / "out")
    assert plain.config.architecture["gates"] is None
    ids = random_ids(1, 12)
    with torch.no_grad(), without(loaded := load_model(moved), SIZES):
        assert torch.equal(plain(ids).logits, loaded(ids).logits)


def test_gates_that_cannot_be_read_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = {"block": {"layers": 2, "attention": {"heads": 2}}}
    stages = [{"project": {"to": 8}}, narrow, {"project": {"to": 16}}, {"block": {"layers": 2}}]
    source = gated_folder(tmp_path / "source", {2: 0.0, 3: 0.0, 4: 0.4}, stages=stages)
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)))
    assert "its stream has another width than the head reads" in capsys.readouterr().out
    assert list(gates_of(load_model(tmp_path / "out"))) == [2, 4]


def test_a_dry_run_writes_the_report_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = gated_folder(tmp_path / "source"), text_file(tmp_path)
    report = tmp_path / "report"
    arguments = ["edit", "select", source, "--text", text, "--rule", "only-if-helps", "--dry-run", "--report", report]
    assert main([*map(str, arguments)]) == 0
    shown = capsys.readouterr().out
    assert "lowers the perplexity" in shown
    assert "The whole model on this text:" in shown
    page = (report / "select.html").read_text()
    assert "by only-if-helps" in page
    assert page.count('<figure class="picture">') == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held-out.txt", "report", "source"]
    assert main([*map(str, arguments)]) == 0, "an older report is replaced"


def test_the_same_call_gives_the_same_numbers(tmp_path: Path) -> None:
    source, text = gated_folder(tmp_path / "source"), str(text_file(tmp_path))
    for name in ("a", "b"):
        edit("select", source, tmp_path / name, text=text)
    one, two = (json.loads((tmp_path / name / "lineage.json").read_text())["measured"] for name in ("a", "b"))
    assert one == two


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.1, "keep": 2}, "either a threshold or the number of gates to keep"),
        ({"before": 3, "keep": 2}, "neither threshold nor keep"),
        ({"before": 9}, "all gates are before layer 9"),
        ({"threshold": -0.1}, "threshold: expected a number of at least 0 and below 1"),
        ({"threshold": 1.0}, "threshold: expected a number of at least 0 and below 1"),
        ({"threshold": float("nan")}, "threshold: expected a number of at least 0 and below 1"),
        ({"keep": -1}, "keep: expected a whole number from 0"),
        ({"rule": "biggest"}, "is not one of smallest-change, only-if-helps, as_printed"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"text": "empty.txt"}, "there is no text in it"),
        ({"report": "."}, "not a report of `braid edit select`"),
    ],
    ids=str,
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    source, text = gated_folder(tmp_path / "source"), str(text_file(tmp_path))
    with pytest.raises(BraidError, match=message):
        edit("select", source, tmp_path / "out", **{"text": text, **options})
    assert not (tmp_path / "out").exists()


def test_a_model_without_gates(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    plain = save_model(tiny_model(vocab_size=tokenizer.vocab_size), tmp_path / "plain", tokenizer, {"made_by": "test"})
    with pytest.raises(BraidError, match="this model has no gates to select from") as error:
        edit("select", plain, tmp_path / "out", text=str(text_file(tmp_path)))
    assert "braid edit gate" in str(error.value.todo)


def test_a_model_of_half_precision(tmp_path: Path) -> None:
    half = load_model(gated_folder(tmp_path / "whole")).bfloat16()
    source = save_model(half, tmp_path / "source", bytes_tokenizer(), {"made_by": "test"})
    out = edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), keep=2)
    assert len(gates_of(load_model(out))) == 2
