"""Where a completion of code ends, and how it becomes a program, by the rules of the original harnesses.

HumanEval: the stop sequences of Chen and others (2021, section 2.3). MBPP: the prompt and `[DONE]` of Austin and others
(2021, section 4). HumanEval-X: CodeGeeX, codegeex/benchmark/utils.py and humaneval-x/evaluate_humaneval_x.py.
"""

import ast
import builtins
import re
import sys
from collections.abc import Mapping, Sequence

from braidlm.evals.sandbox.languages import TestedCode
from braidlm.evals.scoring.stop_strings import truncate_at

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MBPP_STOPS = ("[DONE]",)
FUNCTIONS = {
    "python": re.compile(r"^def\s+(\w+)", re.MULTILINE),
    "js": re.compile(r"^(?:const|let|var|function)\s+(\w+)", re.MULTILINE),
}
"""Where a function begins in the languages whose tests run apart from the program; the last in a prompt is tested."""


def humaneval_code(row: Mapping[str, str], completion: str) -> TestedCode:
    """The function, and its tests with the call of them."""
    prompt, name = row["prompt"], row["entry_point"]
    body = truncate_at(completion, HUMANEVAL_STOPS)
    given, _ = _split_prompt("python", prompt)
    return TestedCode(f"{prompt}{body}", f"{row['test']}\ncheck({name})", given, (name,))


def mbpp_prompt(row: Mapping, examples: Sequence[Mapping]) -> str:
    """Examples with their code, then the task; each with its tests."""
    solved = [f"{_mbpp_question(example)}{example['code']}\n[DONE]\n\n" for example in examples]
    return "".join(solved) + _mbpp_question(row)


def mbpp_code(row: Mapping, completion: str) -> TestedCode:
    """The code, and its tests."""
    tests = "\n".join([row["test_setup_code"], *row["test_list"]])
    undefined = undefined_names(tests)
    modules = [name for name in undefined if name in sys.stdlib_module_names]
    names = tuple(name for name in undefined if name not in modules)
    given = "".join(f"import {name}\n" for name in modules)
    return TestedCode(truncate_at(completion, MBPP_STOPS), tests, given, names)


def undefined_names(tests: str) -> list[str]:
    """The names that tests use and neither they nor Python define; if there is none, the functions that they call.

    One of MBPP's tasks is to write a function `sum`.
    """
    defined, used, called = set(dir(builtins)), {}, {}
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used[node.id] = True
        elif isinstance(node, ast.Name):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called[node.func.id] = True
    return [name for name in used if name not in defined] or list(called)


def _mbpp_question(row: Mapping) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code should pass these tests:"
        f"\n\n{tests}\n[BEGIN]\n"
    )


PYTHON_IMPORTS = (
    *("math", "re", "sys", "copy", "datetime", "itertools", "collections", "heapq", "statistics", "functools"),
    *("hashlib", "string"),
)
GO_IMPORTS = ("math", "strings", "fmt", "strconv", "time", "bytes", "regexp", "sort", "math/rand", "crypto/md5")
CPP_IMPORTS = ("stdlib.h", "algorithm", "math.h", "stdio.h", "vector", "string", "climits", "cstring", "iostream")


def x_is_finished(language: str, text: str) -> bool:
    """Whether the function has been closed: in Python by a line that is not indented, elsewhere by its brace."""
    if language == "python":
        return _first_unindented(text) is not None
    return text.count("{") + 1 == text.count("}")


def x_body(language: str, text: str) -> str:
    """The function's body, closed as its language needs it."""
    if language == "python":
        end = _first_unindented(text)
        return text if end is None else text[:end]
    if language == "java":
        main = text.find("public static void main")
        text = text if main < 0 else text[:main] + "}"
    if language == "go":
        for stop in ("\n//", "\nfunc main("):
            text = text[: text.rfind(stop)] if stop in text else text
    if "}" in text:
        text = text[: text.rfind("}") + 1]
    if language == "java" and text.count("{") + 1 == text.count("}"):
        text += "\n}"  # the class around the method
    return text


def x_code(language: str, row: Mapping[str, str], completion: str) -> TestedCode:
    """The whole program, and its tests."""
    body, prompt, test = x_body(language, completion), row["prompt"], row["test"]
    if language == "python":
        imports = "".join(f"import {name}\n" for name in PYTHON_IMPORTS)
        imports += "from typing import *\nfrom collections import *\n"
        given, names = _split_prompt(language, prompt)
        return TestedCode(f"{imports}{prompt}{body}", test, imports + given, names)
    if language == "js":
        return TestedCode(f"{prompt}{body}", test, *_split_prompt(language, prompt))
    if language == "cpp":
        imports = "".join(f"#include<{name}>\n" for name in CPP_IMPORTS if f"#include<{name}>" not in prompt)
        return TestedCode(f"{imports}\n{prompt}{body}", test)
    if language == "go":
        setup, prompt = row["test_setup"], prompt.replace(row["import"], "")
        used = [name for name in GO_IMPORTS if name not in setup and f"{name.split('/')[-1]}." in body]
        imports = "import (\n" + "".join(f'    "{name}"\n' for name in used) + ")\n" if used else ""
        return TestedCode(f"{setup}\n{imports}{prompt}{body}", test)
    return TestedCode(f"{prompt}{body}", test)


def _split_prompt(language: str, prompt: str) -> tuple[str, tuple[str, ...]]:
    """What a prompt gives beside the function to be written (imports, functions that tests use too), and its name."""
    begins = list(FUNCTIONS[language].finditer(prompt))
    return (prompt[: begins[-1].start()], (begins[-1][1],)) if begins else ("", ())


def _first_unindented(text: str) -> int | None:
    """Where the first line begins that is neither empty nor indented."""
    match = re.search(r"^\S", text, re.MULTILINE)
    return None if match is None else match.start()
