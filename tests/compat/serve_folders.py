"""What vLLM answers, as it serves model folders on a CPU; run as a script where braidlm cannot be imported.

    python serve_folders.py FOLDERS OUT PROCESSES

FOLDERS holds NAME/ (a language model) and prompts.json (token ids). OUT gets NAME.json: the ids of each continuation,
or the error.
"""

import json
import os
import sys
import traceback
from pathlib import Path

NEW_TOKENS = 24
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def serve(folder: Path, prompts: list[list[int]], processes: int) -> list[list[int]]:
    """The greedy continuations of all prompts, in one batch."""
    from vllm import LLM, SamplingParams

    options = {"model_impl": "transformers", "trust_remote_code": True, "dtype": "float32", "enforce_eager": True}
    # Prompts are also read in pieces: few tokens in a step.
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": len(prompts)}
    model = LLM(str(folder), tensor_parallel_size=processes, **options, **limits)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    done = model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(text.outputs[0].token_ids) for text in done]


def main(folders: Path, out: Path, processes: int) -> None:
    """Serve one folder after another, each in a process of its own, which is forked: importing vLLM takes long."""
    import vllm  # noqa: F401

    prompts = json.loads((folders / "prompts.json").read_text())
    for folder in sorted(path for path in folders.iterdir() if path.is_dir()):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            answer: dict[str, object] = {"tokens": serve(folder, prompts, processes)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{error}"}
        answer["imported"] = sorted(name for name in sys.modules if name.split(".")[0] == "braidlm")
        (out / f"{folder.name}.json").write_text(json.dumps(answer))
        os._exit(0)


if __name__ == "__main__":
    os.environ |= SETTINGS
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
