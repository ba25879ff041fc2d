"""Completion scripts, and bash's as bash runs it."""

import shutil
import subprocess

import pytest

from braidlm.cli.completion import SCRIPTS, verb_words
from braidlm.cli.main import VERBS


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: write(verb_words()) for shell, write in SCRIPTS.items()}


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _braid; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.split()


def test_every_verb_and_option_is_known(scripts: dict[str, str]) -> None:
    for script in scripts.values():
        assert not [verb for verb in VERBS if verb not in script]
        assert "all-checkpoints" in script
        assert "tiny/moep" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(scripts: dict[str, str]) -> None:
    script = scripts["bash"]
    assert completed(script, "braid", "tr") == ["train"]
    assert completed(script, "braid", "train", "tiny/moe") == ["tiny/moep"]
    assert completed(script, "braid", "eval", "m", "--all-c") == ["--all-checkpoints"]
    assert completed(script, "braid", "eval", "--dtype", "b") == ["bfloat16"]
    assert completed(script, "braid", "list", "re") == ["recipes"]
    assert "usr" in completed(script, "braid", "generate", "us")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_are_valid(scripts: dict[str, str], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([shell, "-n", "/dev/stdin"], input=scripts[shell], text=True, check=True)
