"""`braid completion`: the script that lets a shell complete verbs, options and names; read from the parser itself."""

import argparse
from typing import NamedTuple

from braidlm.core import console

HELP = "print the script that completes `braid` commands in bash, zsh or fish"
EPILOG = """install it once:
  bash   braid completion bash > ~/.local/share/bash-completion/completions/braid
  zsh    braid completion zsh > "${fpath[1]}/_braid"
  fish   braid completion fish > ~/.config/fish/completions/braid.fish
"""
NAMES = {"RECIPE": "recipes", "X": "recipes", "WHAT": "lists"}
"""What stands for a positional argument of this metavar, beside files and folders."""


class VerbWords(NamedTuple):
    """What can follow a verb."""

    about: str
    options: dict[str, str]
    """Each with its help."""
    values: dict[str, list[str]]
    """The values of each option that has a choice of them."""
    names: list[str]
    """Names of recipes or lists, where the verb takes some."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")


def run(args: argparse.Namespace) -> None:
    script = SCRIPTS[args.shell](verb_words())
    console.show_json({"shell": args.shell, "script": script})
    console.show(script.rstrip("\n"))


def verb_words() -> dict[str, VerbWords]:
    """What can follow each verb."""
    from braidlm.cli.list import WHAT
    from braidlm.cli.main import make_parser
    from braidlm.core.recipes import list_recipes

    known = {"recipes": [name for name, _ in list_recipes()], "lists": list(WHAT)}
    verbs = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    about = {action.dest: action.help or "" for action in verbs._choices_actions}
    words = {}
    for verb, parser in verbs.choices.items():
        options = {option: action for action in parser._actions for option in action.option_strings}
        positionals = [action for action in parser._actions if not action.option_strings]
        names = [action.choices or known.get(NAMES.get(str(action.metavar), ""), []) for action in positionals]
        words[verb] = VerbWords(
            about.get(verb, ""),
            {option: (action.help or "").replace("%%", "%") for option, action in options.items()},
            {option: list(map(str, action.choices)) for option, action in options.items() if action.choices},
            [str(name) for each in names for name in each],
        )
    return words


def bash(words: dict[str, VerbWords]) -> str:
    """For bash; also where zsh emulates it."""
    values = "".join(
        f'      {verb}:{option}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word")); return ;;\n'
        for verb, own in words.items()
        for option, choices in own.values.items()
    )
    options = "".join(
        f'    {verb}) options="{" ".join(own.options)}"; names="{" ".join(own.names)}" ;;\n'
        for verb, own in words.items()
    )
    return f"""# Completion of `braid` for bash; made by `braid completion bash`.
_braid() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  local options names
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(words)} --help --version" -- "$word")); return
  fi
  case "$verb:$before" in
{values}      *) ;;
  esac
  case "$verb" in
{options}    *) return ;;
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$names" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _braid braid
"""


def zsh(words: dict[str, VerbWords]) -> str:
    """For zsh."""
    verbs = "\n".join(f"    {_quoted(f'{verb}:{own.about}')}" for verb, own in words.items())
    cases = "".join(
        f"    {verb})\n      options=({' '.join(_quoted(f'{o}:{text}') for o, text in own.options.items())})\n"
        f"      names=({' '.join(map(_quoted, own.names))}) ;;\n"
        for verb, own in words.items()
    )
    values = "".join(
        f"    {verb}:{option}) compadd -- {' '.join(map(_quoted, choices))}; return ;;\n"
        for verb, own in words.items()
        for option, choices in own.values.items()
    )
    return f"""#compdef braid
# Completion of `braid` for zsh; made by `braid completion zsh`.
_braid() {{
  local -a verbs options names
  verbs=(
{verbs}
  )
  if (( CURRENT == 2 )); then
    _describe verb verbs; return
  fi
  case "$words[2]:$words[CURRENT-1]" in
{values}    *) ;;
  esac
  case "$words[2]" in
{cases}    *) return ;;
  esac
  if [[ "$PREFIX" == -* ]]; then
    _describe option options
  else
    compadd -- $names
    _files
  fi
}}
if [ "$funcstack[1]" = "_braid" ]; then
  _braid "$@"
else
  compdef _braid braid
fi
"""


def fish(words: dict[str, VerbWords]) -> str:
    """For fish."""
    lines = ["# Completion of `braid` for fish; made by `braid completion fish`."]
    for verb, own in words.items():
        lines.append(f"complete -c braid -n __fish_use_subcommand -a {verb} -d {_quoted(own.about)}")
        within = f"complete -c braid -n '__fish_seen_subcommand_from {verb}'"
        for option, text in own.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            choices = f" -x -a {_quoted(' '.join(own.values[option]))}" if option in own.values else ""
            lines.append(f"{within} {kind}{choices} -d {_quoted(text)}")
        if own.names:
            lines.append(f"{within} -a {_quoted(' '.join(own.names))}")
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _quoted(text: str) -> str:
    """A word in single quotes, which all three shells read alike."""
    return "'" + text.replace("'", "’").replace("\\", "").replace("\n", " ") + "'"
