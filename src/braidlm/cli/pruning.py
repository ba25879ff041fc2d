"""The options of `braid eval` that draw quality against remaining parameters."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from braidlm.cli.settings import add_settings, given_settings
from braidlm.core.console import show, show_json
from braidlm.core.errors import BraidError

if TYPE_CHECKING:
    from braidlm.studies.pruning.options import PruningOptions

PREFIX = "prune_"
APART = ("paths", "without", "all_checkpoints", "leaderboard")
"""Options of the verb that are of no use for curves."""


def add_pruning(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `PruningOptions`."""
    from braidlm.studies.pruning.options import PruningOptions

    add_settings(parser, PruningOptions, "curves of pruned models", PREFIX)


def pruning_options(args: argparse.Namespace) -> "PruningOptions | None":
    """What the command line says of pruning, if anything."""
    from braidlm.studies.pruning.options import PruningOptions

    given = given_settings(args, PruningOptions, PREFIX)
    if not given:
        return None
    if "text" not in given:
        raise BraidError(f"this needs --prune-text, the text that modules are used on: --prune-{next(iter(given))}")
    if mixed := [name for name in APART if getattr(args, name)]:
        raise BraidError(f"--prune-text cannot be combined with --{mixed[0].replace('_', '-')}")
    return PruningOptions(**given)


def show_curves(
    models: Sequence[str], tasks: Sequence[str], pruning: "PruningOptions", options: dict[str, Any]
) -> None:
    """Score the pruned models, then show the points as a table or as JSON."""
    from braidlm.core.report.text import show_report
    from braidlm.studies.pruning.curve import prune_curve

    curves = prune_curve(models, tasks, pruning, **options)
    show_json(curves.facts())
    show_report(curves.table())
    show(f"{options['out']}/{curves.name}.html")
