"""Rows of the papers' tables: trainings and evaluations side by side on one GPU, then one file of results a table.

python benchmarks/paper_rows.py benchmarks/plans/rows.yaml --data DIR --out runs/rows [--only moep-table1 pruning]

A plan has tables; a table has chains, one for each combination of what `each` lists and of the parts that `split` makes
of a study's steps; a chain's commands run one after another. As many chains run at once as memory takes, in the order
of the plan; a failed chain is tried once more. The same command goes on with what was stopped. --record writes the
results of what there is so far, and trains nothing. Where there is CUDA's multi-process service it is started; three or
four trainings of these sizes fill an H200, and more of them finish no earlier.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from measure import RESULTS, hardware

from braidlm.core.models.runs import read_metrics
from braidlm.core.recipes import compose_recipe

_LEFT_OUT = {"folder", "run_folder", "sha256", "parts", "by", "metric", "task", "higher_is_better", "silenced", "part"}
"""What a row needs not: where a model lay, and the scores of every set of a task."""

_BRAID = re.compile(r"\bbraid (?=[a-z]+ )")


@dataclass
class Chain:
    """Commands that follow each other in a folder of their own."""

    table: str
    values: dict[str, Any]
    commands: list[str]
    gigabytes: float
    out: Path

    @property
    def name(self) -> str:
        return self.out.name

    @property
    def done(self) -> int:
        """How many of its commands have finished."""
        file = self.out / "done"
        return int(file.read_text()) if file.exists() else 0

    @property
    def is_left(self) -> bool:
        """Whether some of its commands have not finished."""
        return self.done < len(self.commands)

    def run(self, stopped: threading.Event) -> None:
        """Run what has not run yet; a command that fails ends the chain."""
        self.out.mkdir(parents=True, exist_ok=True)
        for number, command in enumerate(self.commands[self.done :], self.done + 1):
            begun = time.time()
            with (self.out / f"{number}.log").open("a") as log:
                process = subprocess.Popen(command, shell=True, stdout=log, stderr=log, start_new_session=True)
                while process.poll() is None:
                    if stopped.wait(0.5):
                        os.killpg(process.pid, signal.SIGINT)
                        process.wait()
            print(f"{self.name}, command {number}: exit {process.returncode}, {time.time() - begun:.0f} s", flush=True)
            if process.returncode and not stopped.is_set():
                print(f"  see {log.name}", flush=True)
            if process.returncode or stopped.is_set():
                return
            (self.out / "done").write_text(str(number))


def parts_of(recipe: str, count: int) -> list[str]:
    """Overrides that leave a study some of its steps, for each part; no step may read one of another part."""
    steps = list(compose_recipe(recipe)["steps"])
    return [" ".join(f"'~steps.{step}'" for at, step in enumerate(steps) if at % count != n) for n in range(count)]


def values_of(facts: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """For each chain of a table the words of its folder's name, and what its commands are filled in with."""
    each, split = facts.get("each", {}), facts.get("split", {})
    parts = [part for recipe, count in split.items() for part in parts_of(recipe, count)] or [""]
    for values in itertools.product(*each.values()):
        for number, part in enumerate(parts, 1):
            words = [str(value).replace(" ", "-") for value in values] + [str(number)] * bool(split)
            yield words, dict(zip(each, values, strict=True)) | ({"part": part} if split else {})


def chains(plan: dict[str, Any], only: list[str] | None, data: Path, out: Path) -> Iterator[Chain]:
    """The chains of the plan's tables, in order."""
    for table, facts in plan.items():
        if only and table not in only:
            continue
        for words, values in values_of(facts):
            folder = out / "-".join([table, *words])
            texts = (text.format(data=data, out=folder, **values) for text in facts["run"])
            commands = [_BRAID.sub(f"{shlex.quote(sys.executable)} -m braidlm ", text) for text in texts]
            yield Chain(table, values, commands, facts.get("gigabytes", 13), folder)


def run_side_by_side(waiting: list[Chain], gigabytes: float) -> None:
    """Run all chains, as many at once as their memory fits, a failed one once more; an interrupt lets each save."""
    stopped, running, again = threading.Event(), dict[threading.Thread, Chain](), set[str]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    waiting = [chain for chain in waiting if chain.is_left]
    while (waiting and not stopped.is_set()) or running:
        failed = [chain for thread, chain in running.items() if not thread.is_alive() and chain.is_left]
        waiting += [chain for chain in failed if chain.name not in again]
        again |= {chain.name for chain in failed}
        running = {thread: chain for thread, chain in running.items() if thread.is_alive()}
        free = gigabytes - sum(chain.gigabytes for chain in running.values())
        fits = next((chain for chain in waiting if chain.gigabytes <= free or not running), None)
        if fits is not None and not stopped.is_set():
            waiting.remove(fits)
            thread = threading.Thread(target=fits.run, args=(stopped,))
            running[thread] = fits
            thread.start()
        else:
            time.sleep(0.5)


def plain(value: Any) -> Any:
    """Without empty values, places and the scores of every set; numbers with five digits after the point."""
    if isinstance(value, dict):
        kept = {key: plain(inner) for key, inner in value.items() if key not in _LEFT_OUT}
        return {key: inner for key, inner in kept.items() if inner not in (None, {}, [])}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return round(value, 5) if isinstance(value, float) else value


def rows_of(chain: Chain) -> Iterator[dict[str, Any]]:
    """The models of each study and evaluation in a chain's folder, each run's last validation, and other JSON files.
    A study that was stopped has the scores of the models that are there."""
    for file in sorted(chain.out.glob("*/results.json")):
        for model in json.loads(file.read_text())["models"]:
            yield plain({**chain.values, "of": file.parent.name} | model)
    for file in sorted(chain.out.glob("*/scores/*.json")):
        if not (file.parents[1] / "results.json").exists():
            scores = json.loads(file.read_text())
            own = {"name": scores["name"], "seed": scores["seed"]}
            yield plain({**chain.values, "of": file.parents[1].name} | own | scores["found"])
    for file in sorted(chain.out.glob("*/metrics.jsonl")):
        validations = read_metrics(file.parent, "validation")
        yield from (plain({**chain.values, "of": file.parent.name} | row) for row in validations[-1:])
    for file in sorted(chain.out.glob("*.json")):
        with contextlib.suppress(json.JSONDecodeError):  # a command that runs is writing it
            yield {**chain.values, "of": file.stem, "result": plain(json.loads(file.read_text()))}


def record_tables(all_chains: list[Chain], notes: dict[str, str], to: Path) -> None:
    """One file of results for each table of which there are any; its notes say what has not finished."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for table, group in itertools.groupby(all_chains, key=lambda chain: chain.table):
        its = list(group)
        left = [f"{chain.name} ({chain.done} of {len(chain.commands)})" for chain in its if chain.is_left]
        rows = [row for chain in its for row in rows_of(chain)]
        if not rows:
            print(f"{table}: nothing yet")
            continue
        date = datetime.now(UTC).date().isoformat()
        facts = {
            "benchmark": table,
            "date": date,
            "hardware": hardware(device),
            "torch": torch.__version__,
            "command": f"python benchmarks/paper_rows.py PLAN --only {table}",
            "notes": "; ".join(filter(None, [notes[table], left and f"commands left: {', '.join(left)}"])),
            "rows": rows,
        }
        path = to / f"{date}-{table.replace('-', '_')}-{'gpu' if device.type == 'cuda' else 'cpu'}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{table}: {path}{', not finished' if left else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of corpora and evaluation sets")
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="tables of the plan (default: all)")
    parser.add_argument("--gigabytes", type=float, default=45, help="memory for all chains together")
    parser.add_argument("--record", action="store_true", help="write the results of finished tables, train nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the files of results go")
    args = parser.parse_args()
    plan = yaml.safe_load(args.plan.read_text())
    unknown = set(args.only or []) - plan.keys()
    if unknown:
        parser.error(f"the plan has no {', '.join(sorted(unknown))}; it has {', '.join(plan)}")
    if not args.data.is_dir() and not args.record:
        parser.error(f"--data: there is no folder {args.data}")
    planned = list(chains(plan, args.only, args.data.resolve(), args.out.resolve()))
    if not args.record:
        if torch.cuda.is_available() and (service := shutil.which("nvidia-cuda-mps-control")):
            subprocess.run([service, "-d"], check=False)
        run_side_by_side(planned, args.gigabytes)
    args.results.mkdir(parents=True, exist_ok=True)
    record_tables(planned, {table: facts.get("notes", "") for table, facts in plan.items()}, args.results)


if __name__ == "__main__":
    main()
