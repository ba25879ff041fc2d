"""Where jobs run: here, one after another, or on the nodes of a Ray cluster.

A job is a function with its arguments, and an argument may be what another job returns. Ray decides which node runs a
job and when, runs it again when its node is lost, and brings its lines to this screen.
"""

import importlib
import importlib.util
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from braidlm import __version__
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import LockedError, make_folder

Key = TypeVar("Key")
RETRIES = 8
"""How often a job whose node or process was lost is run again."""
LOCK_SECONDS = 120.0
"""How long the lock of a lost process may outlive it: file systems over a network notice late."""
CONNECT_SECONDS = 5.0
SAME = ("torch", "transformers", "tokenizers", "safetensors")
"""The libraries that decide, with Braid itself, on what a training computes and writes."""


class Jobs:
    """Jobs that run here, each as soon as it is started."""

    is_remote = False

    def start(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Start a job; what it will return can be an argument of others, and `finished` tells it.

        `gpus` and `cpus` are what a cluster gives it (by default a GPU where there are some, and one core). With
        `fresh`, which the function gets too, it begins anew, but goes on if it is run again after its node was lost.
        """
        return function(*arguments, **_own(options))

    def finished(self, started: Mapping[Key, Any]) -> Iterator[tuple[Key, Any]]:
        """Jobs with what they returned, as they end; the errors of all that failed are one error at the end."""
        yield from started.items()

    def results(self, started: Sequence[Any]) -> list[Any]:
        """What jobs returned, in their order."""
        done = dict(self.finished(dict(enumerate(started))))
        return [done[number] for number in range(len(started))]

    def check_gpus(self, gpus: float, what: str) -> None:
        """Refuse GPUs that no node has, before anything starts."""


def _own(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("gpus", "cpus")}


@contextmanager
def open_jobs(cluster: str | None, folder: Path | str, device: str | None = None) -> Iterator[Jobs]:
    """Jobs here, or on a cluster: `ray` (the one that this machine belongs to, or this machine alone) or `ray:ADDRESS`.

    All nodes must see `folder`, where jobs write, and the working folder.
    """
    if cluster is None:
        yield Jobs()
        return
    kind, _, address = cluster.partition(":")
    if kind != "ray" or address.startswith("//"):
        raise BraidError(f"expected ray or ray:ADDRESS, got {cluster}", "--cluster", "ray:HOST:6379 is a head node's.")
    if importlib.util.find_spec("ray") is None:
        raise BraidError("jobs on a cluster need the package 'ray'", todo="pip install 'braidlm[cluster]'")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two jobs are the progress of both
    ray: Any = importlib.import_module("ray")
    _connect(ray, address)
    make_folder(Path(folder))
    try:
        # A name that no node can have seen before, since network file systems remember for a while what was missing.
        with tempfile.TemporaryDirectory(prefix=".jobs-", dir=folder) as seen:
            place = Place(os.getcwd(), str(Path(seen).absolute()), _versions(), console.is_quiet())
            yield RayJobs(ray, place, device)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    todo = "`ray start --head` on one machine says the address for the others and for --cluster ray:ADDRESS."
    try:
        if host:  # Ray would look for two minutes, and then end the process
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            todo = (
                "Something listens there. A cluster that was started with a token lets no one in without it: set "
                "RAY_AUTH_MODE=token here and on every node, and give all of them the head's ~/.ray/auth_token."
            )
        ray.init(address=address or None, logging_level="warning", log_to_driver=not console.is_quiet())
    except (OSError, ValueError, OverflowError) as error:
        raise BraidError(f"no Ray cluster answers at '{address}'", "--cluster", todo) from error
    except RuntimeError as error:  # another version of Ray or Python
        reason = " ".join(str(error).split())
        raise BraidError(reason, "--cluster", "All machines need the same versions of Ray and Python.") from error


def _versions() -> dict[str, str]:
    """What must be the same on every node; a build's own suffix (`+cpu`) may differ."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"braidlm": __version__, "python": python} | {name: version(name).partition("+")[0] for name in SAME}


@dataclass(frozen=True)
class Place:
    """What a node must have in common with the machine that starts jobs."""

    working_folder: str
    seen: str
    """A folder that is there while jobs run."""
    versions: dict[str, str]
    quiet: bool

    def check(self) -> None:
        """Refuse a node with other versions, or one that does not see the folders."""
        node, own = f"node {socket.gethostname()}", _versions()
        if others := [f"{n} {own[n]} and not {this}" for n, this in self.versions.items() if own[n] != this]:
            todo = "Install the same versions on every node, as constraints.txt has them."
            raise BraidError(f"it has {', '.join(others)}, as the machine that starts the jobs", node, todo)
        for folder in (self.seen, self.working_folder):
            if not Path(folder).is_dir():
                above = Path(folder).parent if folder == self.seen else folder
                todo = "Every node needs the same folders at the same place: a disk that they share (docs/scale.md)."
                raise BraidError(f"it does not see {above}", node, todo)

    def run(self, name: str, function: Callable[..., Any], options: dict[str, Any], *arguments: Any) -> Any:
        """Run a job on this node; it is known by its name whether an earlier try was lost."""
        self.check()
        os.chdir(self.working_folder)
        console.set_quiet(self.quiet)
        tried = Path(self.seen) / name.replace("/", "-")
        is_again = tried.exists()
        tried.touch()
        if is_again:
            console.say("The node or process of this job was lost. Going on from what is saved.")
            options |= {"fresh": False} if "fresh" in options else {}
        until = time.monotonic() + (LOCK_SECONDS if is_again else 0)
        while True:
            try:
                return function(*arguments, **options)
            except LockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(1)
            except BraidError as error:
                raise BraidError(f"{error.what} (on node {socket.gethostname()})", error.where, error.todo) from error


class RayJobs(Jobs):
    """Jobs on a Ray cluster."""

    is_remote = True

    def __init__(self, ray: Any, place: Place, device: str | None):
        self.ray, self.place = ray, place
        self.most_gpus = max((node["Resources"].get("GPU", 0) for node in self._nodes()), default=0)
        with suppress(AttributeError):  # not in every version of Ray
            most = ray._private.state.state.get_max_resources_from_cluster_config() or {}
            self.most_gpus = max(self.most_gpus, most.get("GPU", 0))  # nodes that the autoscaler can start
        asks = device is not None and device.startswith("cuda")
        self.gpus = float(asks or (device is None and self.most_gpus > 0))
        self.check_gpus(self.gpus, f"--device {device}")
        # Every node is looked at before anything starts; one that comes later is looked at by its first job.
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        check = ray.remote(Place.check)
        on = [affinity(node["NodeID"], soft=False) for node in self._nodes()]
        options = {"num_cpus": 0, "max_retries": 0}
        self.results([check.options(scheduling_strategy=one, **options).remote(place) for one in on])

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0)]

    def check_gpus(self, gpus: float, what: str) -> None:
        if gpus > self.most_gpus:
            have = f"the node with the most has {self.most_gpus:g}" if self.most_gpus else "no node has one"
            raise BraidError(f"this asks for {gpus:g} GPU{'s' * (gpus > 1)}, and {have}", what, "Nothing was started.")

    def start(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        gpus, cpus = options.get("gpus"), options.get("cpus")
        asked = {"num_gpus": self.gpus if gpus is None else gpus, "num_cpus": cpus or 1}
        job = self.ray.remote(Place.run).options(name=name, max_retries=RETRIES, **asked)
        return job.remote(self.place, name, function, _own(options), *arguments)

    def finished(self, started: Mapping[Key, Any]) -> Iterator[tuple[Key, Any]]:
        is_job = {key: isinstance(one, self.ray.ObjectRef) for key, one in started.items()}
        yield from ((key, one) for key, one in started.items() if not is_job[key])
        waiting = {one: key for key, one in started.items() if is_job[key]}
        problems: dict[str, BraidError] = {}
        try:
            while waiting:
                (job,), _ = self.ray.wait(list(waiting), num_returns=1)
                try:
                    result = self.ray.get(job)
                except Exception as error:
                    problem = self._problem(error, waiting.pop(job))
                    if str(problem) not in problems:  # jobs that would have read what failed fail with it
                        console.error(problem.lines())
                    problems[str(problem)] = problem
                else:
                    yield waiting.pop(job), result
        finally:
            for job in waiting:  # this process was interrupted: trainings save and end
                self.ray.cancel(job)
            self.ray.wait(list(waiting), num_returns=len(waiting)) if waiting else None
        if len(problems) == 1:
            raise next(iter(problems.values()))
        if problems:
            raise BraidError("\n".join(str(problem).replace("\n", "\n  ") for problem in problems.values()))

    def _problem(self, error: Exception, key: Any) -> BraidError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, BraidError):
            return cause
        if "No module named 'braidlm'" in str(error):
            return BraidError("a node has no braidlm", "--cluster", "Install the same versions on every node.")
        if isinstance(error, (self.ray.exceptions.WorkerCrashedError, self.ray.exceptions.NodeDiedError)):
            what = f"the process of this job was lost {RETRIES + 1} times"
            return BraidError(what, str(key), "A node may have too little memory; the same command goes on.")
        if cause is not None:
            raise error  # a bug of ours, or of a library: with its traceback
        return BraidError(" ".join(str(error).split()), str(key), "The same command goes on from what is saved.")
