"""What the tests of routes share: the command in process, and folders of models whose routing is known."""

from collections.abc import Callable
from pathlib import Path

import pytest

from braidlm.cli.main import main
from tests.inspection.path_models import always, by_character, passing, path_model, saved
from tests.outcome import Outcome
from tests.tiny_models import tiny_model


@pytest.fixture
def routes_verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `braid routes ...` in this process."""

    def run(*arguments: object) -> Outcome:
        code = main(["routes", *map(str, arguments)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """letters: routes by the character; stuck: always the same; linear: shared linear that passes one path; random:
    a Gumbel model as it comes; dense: no paths."""
    made = {
        "letters": by_character(path_model("gumbel_v2")),
        "stuck": always(path_model("gumbel_v1"), "stories", "combined"),
        "linear": passing(path_model("shared_linear", layers=3), "stories", "maths", "maths"),
        "random": path_model("gumbel_v2", ("a", "b", "c")),
        "dense": tiny_model(vocab_size=258),
    }
    root = tmp_path_factory.mktemp("routes")
    return {name: saved(model, root / name) for name, model in made.items()}
