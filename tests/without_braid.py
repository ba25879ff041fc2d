"""Scripts in processes in which braidlm cannot be imported.

Such a process needs seconds to import transformers. One that has done so forks a child for every script, and ends with
the tests.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from braidlm.model.bundle import bundle

WITHOUT_BRAID = """
import sys

class NoBraid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "braidlm":
            raise ImportError("braidlm is not installed here")

sys.meta_path.insert(0, NoBraid())
try:
    import braidlm
except ImportError:
    pass
else:
    raise SystemExit("braidlm can be imported: this test would prove nothing")
"""
"""The beginning of a script for a process of its own."""
_SERVER = """
import json
import os
import runpy
import traceback

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, dynamic_module_utils

torch.set_num_threads(1)
check_folder, code = sys.argv[1:]
runpy.run_path(check_folder)["parse_code_once"]()
dynamic_module_utils.check_imports(code)  # once for all children
for line in sys.stdin:
    script, sys.argv[1:], screen = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            for stream in (1, 2):
                os.dup2(os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            exec(script, {"__name__": "__main__", "sys": sys})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_without_braid(script: str, *arguments: Path | str) -> str:
    """What a script prints, which finds `sys` and its arguments there; an error fails the test."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        screen = Path(folder) / "screen"
        server.stdin.write(json.dumps([script, list(map(str, arguments)), str(screen)]) + "\n")
        server.stdin.flush()
        code, printed = server.stdout.readline().strip(), screen.read_text()
    assert code == "0", printed[-4000:]
    return printed


@functools.cache
def _server() -> subprocess.Popen[str]:
    code = Path(os.environ["HF_HOME"]) / "modeling_braid.py"
    code.write_text(bundle())
    check_folder = Path(__file__).with_name("compat") / "check_folder.py"
    command = [sys.executable, "-I", "-c", WITHOUT_BRAID + _SERVER, check_folder, code]
    environment = os.environ | {"HF_MODULES_CACHE": f"{os.environ['HF_MODULES_CACHE']}-without-braid"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
