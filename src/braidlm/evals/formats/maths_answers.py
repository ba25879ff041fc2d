"""The answer in a solution, and when two answers are the same.

GSM8K: the number after `####` (Cobbe and others, 2021) or after "The answer is" (Wei and others, 2022); numbers are
compared as text without commas, dollar signs and a full stop. MATH: what is boxed, or what "The final answer is"
(Lewkowycz and others, 2022), compared after the rules of Hendrycks and others (2021; modeling/math_equivalence.py of
their repository). The rules are crude, and kept with their quirks, so that scores can be compared.
"""

import re

_STATED = re.compile(r"(?:####|[Tt]he answer is:?|\\boxed\{)\s*\$?\s*(-?\$?[0-9][0-9.,]*|-?\$?\.[0-9]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_FINAL = re.compile(r"Final Answer: The final answer is(.*?)(?:\.\s*I hope|\.?\s*$)", re.DOTALL | re.MULTILINE)


def stated_number(solution: str) -> str | None:
    """The first number that a solution states as its answer."""
    match = _STATED.search(solution)
    return plain_number(match[1]) if match else None


def last_number(solution: str) -> str | None:
    """The last number of any kind: the fallback for a solution that does not state its answer."""
    numbers = [text for text in _NUMBER.findall(solution) if any(character.isdigit() for character in text)]
    return plain_number(numbers[-1]) if numbers else None


def plain_number(text: str) -> str:
    """Without commas, dollar signs and a full stop at its end."""
    return re.sub(r"[,$]", "", text.strip()).rstrip(".")


def stated_expression(solution: str) -> str | None:
    """What "the final answer is", else what the last box holds."""
    match = _FINAL.search(solution)
    if match and (stated := match[1].strip()):
        boxed = last_boxed(stated)
        return boxed if boxed is not None else _without_dollars(stated)
    return last_boxed(solution)


def last_boxed(solution: str) -> str | None:
    """The contents of the last \\boxed{...} or \\fbox{...}; `\\boxed x` ends at a dollar sign."""
    bare = solution.rfind("\\boxed ")
    if bare >= 0:
        return solution[bare + len("\\boxed ") :].split("$")[0]
    start = solution.rfind("\\boxed")
    start = start if start >= 0 else solution.rfind("\\fbox")
    if start < 0:
        return None
    begin = solution.find("{", start)
    depth = 0
    for end in range(max(begin, 0), len(solution) if begin >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[begin + 1 : end]
    return None


def same_expression(one: str | None, other: str | None) -> bool:
    """Whether two answers are the same after normalising; those that cannot be normalised must be equal as they are."""
    if one is None or other is None:
        return False
    try:
        return normalised(one) == normalised(other)
    except ValueError:
        return one == other


def normalised(text: str) -> str:
    """An answer without layout, units, degrees, currency and percent signs, and with fractions written out."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = _without_unit(text).replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:  # "k = 3" is 3
        text = value
    text = _braced_roots(text).replace(" ", "")
    text = _braced_fractions(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    ratio = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))", text)
    if ratio and "-0" not in ratio.groups():
        return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return text


def _without_unit(text: str) -> str:
    """Up to `\\text{ `, with which units begin."""
    before, *after = text.split("\\text{ ")
    if len(after) > 1:
        raise ValueError("two units")
    return before


def _braced_roots(text: str) -> str:
    """\\sqrt3 as \\sqrt{3}."""
    before, *after = text.split("\\sqrt")
    if not all(after):
        raise ValueError("a root of nothing")
    return before + "".join(f"\\sqrt{some}" if some[0] == "{" else f"\\sqrt{{{some[0]}}}{some[1:]}" for some in after)


def _braced_fractions(text: str) -> str:
    """\\frac12, \\frac1b and \\frac1{72} with braces around each part; \\frac{72}1 stays, as in the original."""
    before, *after = text.split("\\frac")
    braced = before
    for some in after:
        if not some:
            raise ValueError("a fraction of nothing")
        if some[0] == "{":
            braced += f"\\frac{some}"
        elif len(some) < 2:
            return text
        else:
            below = some[1] if some[1] == "{" else f"{{{some[1]}}}"
            braced += f"\\frac{{{some[0]}}}{below}{some[2:]}"
    return braced


def _without_dollars(text: str) -> str:
    """The part between dollar signs, if there is one."""
    match = re.search(r"\$(.+?)\$", text, re.DOTALL)
    return match[1].strip() if match else text.strip().rstrip(".")
