"""Where a model came from as a graph: models, what made them (recipes and edits), and the data they were trained on.

A lineage may be a stranger's: nothing in it is taken for granted, and a graph has at most MAX_NODES nodes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from braidlm.core.files import json_sha256
from braidlm.core.models.runs import training_of

Kind = Literal["model", "edit", "recipe", "data"]
TRAINED = "braid train"
MAX_NODES = 500
MAX_TEXT = 300
"""Characters of a label or a fact."""
UNNAMED = re.compile(r"model|(step-|chck_).*")
"""The name of a source that tells no two apart; its recipe's name does."""
SHORT = 12
"""Characters of a hash that tell models apart for people."""


@dataclass(frozen=True)
class Node:
    """A model, what made it, or data."""

    id: str
    label: str
    kind: Kind
    facts: dict[str, Any]
    """What the lineage records, under flat names."""
    __pydantic_config__ = {"use_attribute_docstrings": True}  # for the schema of the server


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    label: str = ""


@dataclass
class LineageGraph:
    """The model itself is the first node."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def lineage_graph(
    name: str, lineage: Mapping[str, Any] | None, find: Callable[[str], Mapping[str, Any] | None] = lambda sha256: None
) -> LineageGraph:
    """The graph of a model by its lineage, and by those of its sources as far as they are recorded.

    `find` may know the lineage of a source by the SHA-256 of its weights.
    """
    builder = _Builder(find)
    builder.model(name, dict(lineage or {}))
    return builder.graph


class _Builder:
    def __init__(self, find: Callable[[str], Mapping[str, Any] | None]):
        self.find, self.graph = find, LineageGraph()
        self.known: dict[str, str] = {}
        """The ids of nodes by what identifies what they stand for."""

    def model(self, name: str, record: Mapping[str, Any], depth: int = 0) -> str | None:
        """The node of a model, and all that it came from; None where the graph is full."""
        weights = record.get("weights")
        sha256 = record.get("sha256") or (weights.get("sha256") if isinstance(weights, dict) else None)
        identity = sha256 or (weights if isinstance(weights, dict) else None) or [name, depth, len(self.graph.nodes)]
        nested = record.get("lineage")
        known = dict(nested) if isinstance(nested, dict) else dict(record)
        if depth and isinstance(sha256, str):  # the model's own lineage, if it is here, says more than was recorded
            known |= dict(self.find(sha256) or {})
        recipe = known.get("recipe")
        if depth and UNNAMED.fullmatch(name) and isinstance(recipe, dict):
            name = str(recipe.get("name") or name)
        kept = ("model", "format", "role", "licence", "created", "length")
        facts = {key: record[key] for key in kept if record.get(key)} | ({"sha256": sha256} if sha256 else {})
        facts["training"] = training_of(dict(record))
        id, is_new = self._node("model", name, _flat(facts), identity)
        if id is None or not is_new:
            return id
        base = known.get("base")
        if isinstance(base, dict):
            self._edge(self.model(_name_of(base), base, depth + 1), id, "base")
        maker = self._maker(known, id) or id
        sources = known.get("sources")
        for source in sources if isinstance(sources, list) else []:
            if isinstance(source, dict):
                self._source(source, maker, known, depth)
        return id

    def _maker(self, known: Mapping[str, Any], made: str) -> str | None:
        """The recipe or edit that made a model."""
        made_by, recipe = known.get("made_by"), known.get("recipe")
        if not isinstance(made_by, str) or not made_by:
            return None
        if made_by == TRAINED:
            recipe = recipe if isinstance(recipe, dict) else {}
            label = recipe.get("name") or f"recipe {str(known.get('recipe_sha256', ''))[:SHORT]}".strip()
            training, kept = recipe.get("training"), ("budget", "batch", "optimizer", "seed")
            facts = {"recipe_sha256": known.get("recipe_sha256")}
            facts |= {key: recipe[key] for key in ("seed", "licence") if recipe.get(key) is not None}
            facts |= {key: training[key] for key in kept if key in training} if isinstance(training, dict) else {}
            id, _ = self._node("recipe", str(label), _flat(facts), [made, made_by])
        else:
            options = known.get("options")
            facts = {"made by": made_by, **(_flat(options) if isinstance(options, dict) else {})}
            id, _ = self._node("edit", made_by.removeprefix("braid "), facts, [made, made_by])
        self._edge(id, made, "")
        return id

    def _source(self, source: Mapping[str, Any], maker: str, known: Mapping[str, Any], depth: int) -> None:
        if "data" in source:
            own: Any = known
            for key in ("recipe", "data", "sets", str(source["data"])):
                own = own.get(key) if isinstance(own, Mapping) else None
            facts = _flat({key: value for key, value in source.items() if key != "data"})
            if isinstance(own, dict):
                facts |= _flat({key: own[key] for key in ("source", "folder", "path") if own.get(key)})
            id, _ = self._node("data", str(source["data"]), facts, [source["data"], facts])
            tokens = source.get("tokens")
            self._edge(id, maker, f"{tokens:,} tokens" if isinstance(tokens, int) else "")
            return
        role = source.get("role") or ("start" if known.get("made_by") == TRAINED else "")
        self._edge(self.model(_name_of(source), source, depth + 1), maker, str(role))

    def _node(self, kind: Kind, label: str, facts: dict[str, Any], identity: Any) -> tuple[str | None, bool]:
        """The id of a node, and whether it is new."""
        key = f"{kind} {json_sha256(json.loads(json.dumps(identity, default=str)))}"
        if key in self.known:
            return self.known[key], False
        if len(self.graph.nodes) >= MAX_NODES:
            return None, False
        id = self.known[key] = f"{kind}-{len(self.graph.nodes)}"
        self.graph.nodes.append(Node(id, label[:MAX_TEXT], kind, facts))
        return id, True

    def _edge(self, source: str | None, target: str | None, label: str) -> None:
        if source and target and (edge := Edge(source, target, label[:MAX_TEXT])) not in self.graph.edges:
            self.graph.edges.append(edge)


def _name_of(source: Mapping[str, Any]) -> str:
    """What a source is called: the path that it became, before its folder, which may be `step-001000`."""
    return str(next((source[key] for key in ("name", "model", "path") if source.get(key)), "a model"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain values under names with dots, as people read them; texts are shortened, and what is nested deep is left."""
    flat: dict[str, Any] = {}
    for key, value in list(values.items())[:MAX_NODES]:
        name = f"{prefix}{key}"[:MAX_TEXT]
        if isinstance(value, dict) and prefix.count(".") < 3:
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, (bool, int, float)):
            flat[name] = value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
        elif isinstance(value, (list, tuple)):
            flat[name] = ", ".join(map(str, value))[:MAX_TEXT]
        elif value is not None and not isinstance(value, dict):
            flat[name] = str(value)[:MAX_TEXT]
    return flat
