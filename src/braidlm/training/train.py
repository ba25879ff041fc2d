"""`braid train`: a recipe into a run folder, from the beginning or resumed."""

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.devices import PeakMemory, check_training_fits, device_name
from braidlm.core.errors import BraidError
from braidlm.core.files import json_sha256
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.adapters import check_peft
from braidlm.core.models.folders import check_vocabulary, read_tokenizer, set_special_ids
from braidlm.core.models.runs import last_records
from braidlm.core.report.page import notebook
from braidlm.core.report.report import Table
from braidlm.data.loading.open_data import OpenData, open_data
from braidlm.data.loading.order import FOLDER as ORDER
from braidlm.data.loading.order import order_streams, record_orders
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.ranges import MAX_INTEGER
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import freeze
from braidlm.opening.open import open_model
from braidlm.training.amounts import Progress
from braidlm.training.decoder import make_decoder, plan_decoder_run
from braidlm.training.features.feature import asked_features
from braidlm.training.loop import Trainer
from braidlm.training.lora import Adapter
from braidlm.training.monitoring.tracking import Tracker, record_event
from braidlm.training.recipe import LoadedRecipe, Recipe, decode_recipe, load_recipe
from braidlm.training.run_folder import check_folder, claimed, update_recipe
from braidlm.training.saving.checkpoints import Checkpoints
from braidlm.training.start_from import (
    check_length,
    check_not_quantised,
    data_of,
    load_start,
    open_decoder,
    train_gates_alone,
    use_routing_losses,
)
from braidlm.training.step.layout import shards_of
from braidlm.training.step.parallel import Rank, join_group, main_first
from braidlm.training.trainable import Trainable, TrainableBraid

MAX_PROCESSES = 1 << 16  # more than any run has: a position that says more is damaged


@dataclass
class Run:
    """The result of a training."""

    folder: Path
    model: Path  # the newest model folder
    progress: Progress
    finished: bool  # False if it was stopped before its end
    stopped_by: type[KeyboardInterrupt] | None = None
    """The kind of the signal that stopped it: KeyboardInterrupt for Ctrl-C, Terminated for SIGTERM."""
    trainable: int = 0  # how many parameters were trained

    def facts(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        where = {"folder": str(self.folder), "model": str(self.model)}
        return {**where, "finished": self.finished, **asdict(self.progress)}

    def _repr_html_(self) -> str:
        """In a notebook: what was trained, and the last records of its metrics."""
        last = last_records(self.folder)
        loss, bits = last.get("train", {}).get("loss"), last.get("validation", {}).get("bits_per_byte")
        figures = {**self.facts(), "loss": loss, "bits per byte": bits}
        return notebook(Table(("run", self.folder.name), list(figures.items())))


def train(
    recipe: str | dict[str, Any], overrides: list[str] | None = None, device: str | None = None, fresh: bool = False
) -> Run:
    """Train as a recipe says (a name, a file, or its content). The same call again resumes where it was stopped.
    `fresh` removes what the run folder holds."""
    if isinstance(recipe, dict) and overrides:
        raise BraidError("overrides change a recipe that is named; change the content itself")
    loaded = decode_recipe(recipe) if isinstance(recipe, dict) else load_recipe(str(recipe), overrides)
    with join_group(device) as rank:
        if not rank.is_main:
            console.set_quiet(True)
        return _train(loaded, rank, fresh)


def _train(loaded: LoadedRecipe, rank: Rank, fresh: bool) -> Run:
    """Check everything before the folder is touched, so that an error leaves nothing behind."""
    recipe, folder, resolved = loaded.recipe, Path(loaded.recipe.folder), loaded.as_dict()
    if not fresh and rank.world_size == 1 and (run := _finished(recipe, resolved, rank)):
        return run
    memory = PeakMemory(rank.device)
    _check_architecture(loaded, rank)
    if recipe.training.lora is not None:
        check_peft("leave out training.lora to train the model's own weights.")
    if rank.is_main:
        check_folder(folder, resolved, fresh)
    data = main_first(lambda: open_data(data_of(recipe), recipe.validation.half), rank)
    known = None if fresh else folder / ORDER
    data = replace(data, train=order_streams(data.train, recipe.data.order, recipe.seed, known))
    torch.manual_seed(recipe.seed)
    trained = _make_trainable(loaded, data, rank)
    recipe = recipe if fresh else with_rows_of_run(recipe, folder, rank)
    # Dropout differs between processes, weights do not.
    torch.manual_seed((recipe.seed * 1000 + rank.index) % MAX_INTEGER)
    trainer = Trainer(recipe, trained, data, _lineage(loaded, data), rank, memory)
    with claimed(folder, resolved, fresh) if rank.is_main else contextlib.nullcontext():
        if rank.is_main:
            record_orders(data.train, folder / ORDER)
        return _run(trainer, folder, resolved)


def _finished(recipe: Recipe, resolved: dict[str, Any], rank: Rank) -> Run | None:
    """The run in the folder, if there is nothing left to do: neither its data nor its model are needed to say so, but
    for one that trains what stands beside a base, which may have changed."""
    folder, budget = Path(recipe.folder), recipe.training.budget
    if recipe.decoder is not None or recipe.training.lora is not None:
        return None
    checkpoints = Checkpoints(folder, rank, recipe.checkpoints.keep)
    name, position = checkpoints.finished(budget) or ("", {})
    if "trainable" not in position:  # nor had states of version 0.1
        return None
    check_folder(folder, resolved, fresh=False)
    with claimed(folder, resolved, fresh=False):
        checkpoints.remove_leftovers()
        update_recipe(folder, resolved)
    console.say(f"{folder} is finished already ({budget}).")
    progress = Progress(**position["progress"])
    return Run(folder, checkpoints.models / name, progress, finished=True, trainable=position["trainable"])


def with_rows_of_run(recipe: Recipe, folder: Path, rank: Rank) -> Recipe:
    """The recipe with as many rows in a step as the run in its folder has, which other processes may have begun."""
    training, rows = recipe.training, Checkpoints(folder, rank, None).rows_of_a_step() or 0
    of_one = training.batch * training.accumulation
    begun_by = rows // of_one if rows % of_one == 0 else 0
    if begun_by == rank.world_size or not 0 < begun_by <= MAX_PROCESSES:  # else the position is refused as it is read
        return recipe
    own, rest = divmod(rows, rank.world_size)
    if rest:
        what = f"a step of this run has {rows} rows, which do not divide among {rank.world_size} processes"
        raise BraidError(what, str(folder), "Start another number of processes.")
    batch = max(size for size in range(1, min(own, training.batch) + 1) if own % size == 0)
    console.say(
        f"A step of this run has {rows} rows: each of {rank.world_size} processes makes {own // batch} forward passes "
        f"of {batch} rows in it."
    )
    return replace(recipe, training=replace(training, batch=batch, accumulation=own // batch))


def _make_trainable(loaded: LoadedRecipe, data: OpenData, rank: Rank) -> Trainable:
    """What the recipe trains, with all else frozen."""
    if loaded.recipe.decoder is not None:
        return make_decoder(loaded.recipe, data, rank.device)
    model, training = _make_model(loaded, data, rank), loaded.recipe.training
    if shards_of(training, model, rank) == 1:  # else each process moves its part alone
        model = model.to(rank.device)
    freeze(model, training.freeze)
    if training.train == "gates":
        train_gates_alone(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        own = ", ".join(model.config.frozen)
        also = f" The model's own `frozen` (config.json) is {own}." if own else ""
        todo = f"Take parts out of training.freeze.{also}"
        raise BraidError("everything is frozen: there is nothing to train", todo=todo)
    return TrainableBraid(model, _add_adapter(model, loaded))


def _add_adapter(model: BraidForCausalLM, loaded: LoadedRecipe) -> Adapter | None:
    """The adapter that is trained in place of the model's weights, if the recipe asks for one."""
    training, start = loaded.recipe.training, loaded.recipe.start_from
    if training.lora is None or start is None:
        return None
    adapter = Adapter(model, training.lora, open_model(start, "braid").record())
    console.say(adapter.summary())
    if adapter.has_banks and training.compile is not False:
        if training.compile:
            console.warn("training.compile has no effect: torch cannot compile peft's adapters of banks")
        training.compile = False
    return adapter


def _run(trainer: Trainer, folder: Path, recipe: dict[str, Any]) -> Run:
    """Resume the run if there is a checkpoint, and train it to its end."""
    resumed, finished = trainer.resume(), trainer.finished
    if trainer.rank.is_main:
        update_recipe(folder, recipe)
    if finished:
        console.say(f"{folder} is finished already ({trainer.budget}).")
    else:
        if resumed:
            console.say(f"Going on from checkpoint {resumed} (step {trainer.progress.steps:,}).")
        finished = _track(trainer, folder)
    newest = trainer.checkpoints.newest_good()
    assert newest is not None  # the run always saves when it ends or is stopped
    if not finished:
        console.say(f"Stopped and saved as {newest}. The same command goes on from there.")
    stopped_by, model = None if finished else trainer.stop.interruption, trainer.checkpoints.models / newest
    return Run(folder, model, trainer.progress, finished, stopped_by, trainer.trainable_parameters)


def _track(trainer: Trainer, folder: Path) -> bool:
    if not trainer.rank.is_main:
        return trainer.run(None)
    steps = trainer.progress.steps
    tracker = Tracker(folder, trainer.recipe.log, trainer.recipe.name, steps, trainer.recorded)
    facts = {
        "step": steps,
        "device": device_name(trainer.rank.device),
        "processes": trainer.rank.world_size,
        "torch": torch.__version__,
        **trainer.costs,
    }
    counts = (console.count(trainer.trainable_parameters), console.count(facts["parameters"]))
    which = " of ".join(dict.fromkeys(counts))
    console.say(f"Training {which} parameters for {trainer.budget} ({facts['device']}), in {folder}")
    record_event(folder, "start", **facts)
    with contextlib.closing(tracker):
        try:
            return trainer.run(tracker)
        except BraidError as error:
            record_event(folder, "failure", step=trainer.progress.steps, error=error.what.split("\n")[0])
            raise


def _check_architecture(loaded: LoadedRecipe, rank: Rank) -> None:
    """Find a model that cannot be built before its data is prepared, which may take long."""
    if loaded.recipe.decoder is not None:
        console.say(plan_decoder_run(loaded.recipe, rank.device))
    elif loaded.recipe.start_from is not None:
        start = open_model(loaded.recipe.start_from, "braid")
        check_not_quantised(start.config.decoded, str(start.folder))
    elif loaded.architecture is not None:
        check_not_quantised(loaded.architecture, "model.compression")
        check_length(loaded.architecture.context, loaded.recipe.data.length)
        _check_memory(BraidConfig(architecture=loaded.architecture, vocab_size=loaded.vocab_size or 1), loaded, rank)


def _check_memory(config: BraidConfig, loaded: LoadedRecipe, rank: Rank) -> None:
    """Refuse a model that cannot be built, or cannot be trained in the memory there is."""
    model = skeleton(config)
    for feature in asked_features(loaded.recipe.training, loaded.recipe.data).values():
        feature.check_model(model, loaded.recipe.training, loaded.recipe.data)
    freeze(model, [*config.frozen, *loaded.recipe.training.freeze])
    if loaded.recipe.training.train == "gates":
        train_gates_alone(model)
    if loaded.recipe.training.lora is not None:
        model.requires_grad_(False)  # adapters are small, and nothing else has gradients
    check_training_fits(model, rank.device, shards_of(loaded.recipe.training, model, rank))


def _make_model(loaded: LoadedRecipe, data: OpenData, rank: Rank) -> BraidForCausalLM:
    """A fresh model, or the one to start from."""
    if loaded.recipe.start_from is not None:
        start = open_model(loaded.recipe.start_from, "braid")
        _check_memory(start.config, loaded, rank)
        return load_start(start, loaded, data)
    vocab_size = loaded.vocab_size or data.tokenizer.vocab_size
    check_vocabulary(vocab_size, data.tokenizer, "model.vocab_size")
    assert loaded.architecture is not None
    config = BraidConfig(architecture=loaded.architecture, vocab_size=vocab_size)
    set_special_ids(config, data.tokenizer)
    _check_memory(config, loaded, rank)
    use_routing_losses(config, loaded.recipe.training.routing_losses)
    model = BraidForCausalLM(config)
    read_tokenizer(model, data.tokenizer)
    return model


def _lineage(loaded: LoadedRecipe, data: OpenData) -> dict[str, Any]:
    """What the lineage of every checkpoint says of the recipe and of its sources."""
    recipe = loaded.as_dict()
    sources: list[dict[str, Any]] = [
        {"data": s.name, "tokens": len(s), "words": s.words, "subset": vars(s.subset)} for s in data.train
    ]
    if loaded.recipe.start_from:
        sources.append(open_model(loaded.recipe.start_from, "braid").record())
    if loaded.recipe.decoder:
        sources.append(open_decoder(loaded.recipe).record())
    licence = {"licence": loaded.recipe.licence} if loaded.recipe.licence else {}
    made = {"made_by": "braid train", "recipe": recipe, "recipe_sha256": json_sha256(recipe)}
    return {**made, "sources": sources, **licence}
