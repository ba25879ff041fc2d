"""Where a completion of code ends, and how it becomes a program, by the rules of the original harnesses.

HumanEval: the stop sequences of Chen and others (2021, section 2.3). MBPP: the prompt and `[DONE]` of Austin and others
(2021, section 4). HumanEval-X: CodeGeeX, codegeex/benchmark/utils.py and humaneval-x/evaluate_humaneval_x.py.
"""

import re
from collections.abc import Mapping, Sequence

from braidlm.evals.scoring.stop_strings import truncate_at

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MBPP_STOPS = ("[DONE]",)


def humaneval_program(row: Mapping[str, str], completion: str) -> str:
    """The function, its tests and the call of them."""
    body = truncate_at(completion, HUMANEVAL_STOPS)
    return f"{row['prompt']}{body}\n{row['test']}\ncheck({row['entry_point']})"


def mbpp_prompt(row: Mapping, examples: Sequence[Mapping]) -> str:
    """Examples with their code, then the task; each with its tests."""
    solved = [f"{_mbpp_question(example)}{example['code']}\n[DONE]\n\n" for example in examples]
    return "".join(solved) + _mbpp_question(row)


def mbpp_program(row: Mapping, completion: str) -> str:
    """The code and its tests."""
    return "\n".join([truncate_at(completion, MBPP_STOPS), row["test_setup_code"], *row["test_list"]])


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


def x_program(language: str, row: Mapping[str, str], completion: str) -> str:
    """The whole program with its tests."""
    body, prompt, test = x_body(language, completion), row["prompt"], row["test"]
    if language == "python":
        imports = "".join(f"import {name}\n" for name in PYTHON_IMPORTS)
        return f"{imports}from typing import *\nfrom collections import *\n{prompt}{body}\n{test}\n"
    if language == "cpp":
        imports = "".join(f"#include<{name}>\n" for name in CPP_IMPORTS if f"#include<{name}>" not in prompt)
        return f"{imports}\n{prompt}{body}\n{test}"
    if language == "go":
        setup, prompt = row["test_setup"], prompt.replace(row["import"], "")
        used = [name for name in GO_IMPORTS if name not in setup and f"{name.split('/')[-1]}." in body]
        imports = "import (\n" + "".join(f'    "{name}"\n' for name in used) + ")\n" if used else ""
        return f"{setup}\n{imports}{prompt}{body}\n{test}"
    return f"{prompt}{body}\n{test}"


def _first_unindented(text: str) -> int | None:
    """Where the first line begins that is neither empty nor indented."""
    match = re.search(r"^\S", text, re.MULTILINE)
    return None if match is None else match.start()
