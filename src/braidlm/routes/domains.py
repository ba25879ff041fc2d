"""From what a text is about to the path that should know it."""

from collections.abc import Iterable, Mapping, Sequence

from braidlm.core.errors import BraidError, did_you_mean


def right_paths(
    domains: Iterable[str], paths: Sequence[str], given: Mapping[str, str], where: str
) -> dict[str, str | None]:
    """The path of each domain: the one `given` for it, of the same name, or at that place counted from 1.

    Where not one domain fits a path of the model and nothing is given, no path is right for any: there is still
    something to see. But where one of several does not fit, that is a mistake.
    """
    names = list(dict.fromkeys(domains))
    if not given and not any(_fits(name, paths) or _is_near(name, paths) for name in names):
        return dict.fromkeys(names)
    return {name: _right_path(name, paths, given, where) for name in names}


def check_given(given: Mapping[str, str], domains: Iterable[str], paths: Iterable[str]) -> None:
    """Every domain of a mapping must be some text's, and every path some model's."""
    domains, paths = list(dict.fromkeys(domains)), list(dict.fromkeys(paths))
    for domain, path in given.items():
        if domain not in domains:
            known = did_you_mean(domain, domains) or " None has a domain."
            raise BraidError(f"no prompt or data set has the domain '{domain}'.{known}", "--domains")
        if path and not _fits(path, paths):
            raise BraidError(f"no model has a path '{path}'.{did_you_mean(path, paths)}", f"--domains {domain}={path}")


def _right_path(name: str, paths: Sequence[str], given: Mapping[str, str], where: str) -> str | None:
    if given.get(name) == "":  # said to be of no path
        return None
    for wanted in (given.get(name, name), name):
        if _fits(wanted, paths):
            return paths[int(wanted) - 1] if wanted.isdecimal() else wanted
    raise BraidError(
        f"the domain '{name}' is no path of this model.{did_you_mean(name, paths)}",
        where,
        f"Say which path should know it: `--domains {name}=PATH`, or `--domains {name}=` if none should.",
    )


def _fits(name: str, paths: Sequence[str]) -> bool:
    return name in paths or (name.isdecimal() and 1 <= int(name) <= len(paths))


def _is_near(name: str, paths: Sequence[str]) -> bool:
    return name.isdecimal() or "Did you mean" in did_you_mean(name, paths)
