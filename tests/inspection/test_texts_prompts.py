"""Prompts from files, and which path a domain means."""

from pathlib import Path

import pytest

from braidlm.core.decoding.generation import Prompt, read_prompts
from braidlm.core.errors import BraidError
from braidlm.inspection.texts import check_domains, right_paths


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_the_papers_prompts_come_with_braid() -> None:
    prompts = read_prompts("papaformer")
    assert len(prompts) == 20
    assert [prompt.domain for prompt in prompts] == ["stories"] * 10 + ["maths"] * 10
    assert prompts[0] == Prompt("Once upon a time, there was a little", "stories", "Prompt_1")
    assert (prompts[12].label, prompts[17].label) == ("<llm-code>", "Let's solve this problem")


def test_lines_of_text_and_of_json(tmp_path: Path) -> None:
    plain = written(tmp_path, "a.txt", "One day\n\n  two spaces\n")
    assert read_prompts(plain) == [Prompt("One day"), Prompt("  two spaces")]
    lines = (
        '{"prompt": "One", "domain": 2}\n{"prompt": "café", "extra": 1}\n{"prompt": "x", "domain": "a", "name": "N"}'
    )
    assert read_prompts(written(tmp_path, "a.jsonl", lines)) == [
        Prompt("One", "2"),
        Prompt("café"),
        Prompt("x", "a", "N"),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{prompt: x}", "this line is not JSON (Expecting property name"),
        ("[1, 2]", "this line is not an object but [1, 2]"),
        ('{"promt": "x"}', "there is no 'prompt'. Did you mean 'promt'?"),
        ('{"text": "x"}', "there is no 'prompt'. It has: text."),
        ('{"prompt": 3}', "'prompt' is to be text, not 3"),
        ('{"prompt": "x", "domain": 1.5}', "'domain' is to be text or a path's number, not 1.5"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(BraidError) as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}, line 3"
    assert caught.value.what.startswith(what)


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    written(tmp_path, "prompts.jsonl", "\n")
    with pytest.raises(BraidError, match=r"no such file of prompts. Did you mean 'prompts.jsonl'\?"):
        read_prompts(tmp_path / "prompt.jsonl")
    with pytest.raises(BraidError, match=r"there is no prompt in this file"):
        read_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(BraidError, match=r"Did you mean 'papaformer'\?"):
        read_prompts("papaforme")
    (tmp_path / "bytes.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BraidError, match="not UTF-8"):
        read_prompts(tmp_path / "bytes.txt")


PATHS = ["stories", "maths"]


def test_a_domain_is_a_path_by_name_number_or_mapping() -> None:
    assert right_paths(["stories", "maths", "stories"], PATHS, {}, "m") == {"stories": "stories", "maths": "maths"}
    assert right_paths(["1", "2"], PATHS, {}, "m") == {"1": "stories", "2": "maths"}
    given = {"code": "maths", "tales": "1", "other": ""}
    assert right_paths(["code", "tales", "other", "stories"], PATHS, given, "m") == {
        "code": "maths",
        "tales": "stories",
        "other": None,
        "stories": "stories",
    }


def test_a_mapping_for_another_model_leaves_names_alone() -> None:
    assert right_paths(["stories"], PATHS, {"stories": "path_1"}, "m") == {"stories": "stories"}


def test_domains_that_have_nothing_to_do_with_the_paths() -> None:
    assert right_paths(["stories", "maths"], ["path_1", "path_2"], {}, "m") == {"stories": None, "maths": None}


@pytest.mark.parametrize(
    ("domains", "what"),
    [
        (["stories", "code"], "the domain 'code' is no path of this model. There are: maths, stories."),
        (["storys"], "the domain 'storys' is no path of this model. Did you mean 'stories'?"),
        (["3"], "the domain '3' is no path of this model. There are: maths, stories."),
        (["0", "1"], "the domain '0' is no path of this model."),
    ],
)
def test_a_domain_that_is_no_path(domains: list[str], what: str) -> None:
    with pytest.raises(BraidError) as caught:
        right_paths(domains, PATHS, {}, "some/model")
    assert caught.value.what.startswith(what)
    assert caught.value.where == "some/model"
    assert "--domains" in str(caught.value)


def test_a_mapping_is_checked() -> None:
    check_domains({"stories": "path_1"}, ["stories"], ["path_1"])
    with pytest.raises(BraidError, match=r"no prompt or data set has the domain 'storys'. Did you mean 'stories'\?"):
        check_domains({"storys": "path_1"}, ["stories"], ["path_1"])
    with pytest.raises(BraidError, match=r"no model has a path 'path_3'. Did you mean 'path_\d'\?"):
        check_domains({"stories": "path_3"}, ["stories"], ["path_1", "path_2"])


def test_what_is_said_of_one_model_need_not_fit_another() -> None:
    """In a study one model's paths are the owners', another's have names of their own, and a third has none."""
    path_of = {"stories": "stories_owner", "maths": "maths_owner"}
    assert right_paths(path_of, ["stories_owner", "maths_owner"], path_of, "M") == path_of
    for others in (["left", "right"], []):
        assert right_paths(path_of, others, path_of, "M") == {"stories": None, "maths": None}
    with pytest.raises(BraidError, match="the domain 'maths' is no path of this model"):
        right_paths(path_of, ["stories_owner", "third"], path_of, "M")
