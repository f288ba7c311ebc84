"""How far a text's log-probabilities move with keys and values in float8: `python -m benchmarks.float8_error`

The bundled model over this project's README, in float32 on a CPU, where the kernels' twins in plain torch do what a GPU would.
"""

import json
import statistics
from pathlib import Path

import torch
from transformers import AutoTokenizer

from loray.models import runner
from loray.models.checkpoint import resolve_model
from loray.models.parallel import Parallel
from loray.models.runner import Runner
from loray.models.runner_sizes import RunnerOptions, RunnerSizes
from loray.models.step import Admission, Row, Sampling, Step

TEXT = Path(__file__).parent.parent / "README.md"
NUM_TOKENS, BLOCK = 1024, 16


def text_logprobs(folder: Path, tokens: list[int], has_float8_cache: bool) -> list[float]:
    """In two chunks: the second reads keys and values of the first from the cache."""
    sizes = RunnerSizes(1, len(tokens) + 1, BLOCK)
    made = Runner(folder, Parallel(), torch.device("cpu"), torch.float32, sizes, RunnerOptions(has_float8_cache=has_float8_cache))
    num_blocks, half = len(tokens) // BLOCK, len(tokens) // 2
    made.allocate(num_blocks, 0)
    blocks = list(range(num_blocks))
    admission = Admission(0, tokens, [], 0, [], Sampling(), wants_prompt_logprobs=True)
    made.execute(Step(0, [], [admission], [Row(0, half, blocks[: num_blocks // 2], False)]))
    return made.execute(Step(0, [], [], [Row(0, half, blocks[num_blocks // 2 :], True)])).prompt_logprobs[0]


def main() -> None:
    runner.uses_triton = lambda device: True  # the way that steps take on a GPU, which alone has such a cache
    folder = resolve_model("smollm2-135m")
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT.read_text()).input_ids[:NUM_TOKENS]
    exact, found = (text_logprobs(folder, tokens, has_float8_cache) for has_float8_cache in (False, True))
    errors = [abs(a - b) for a, b in zip(exact, found, strict=True)]
    report = {
        "tokens": len(exact),
        "mean_logprob": round(statistics.mean(exact), 4),
        "mean_logprob_in_float8": round(statistics.mean(found), 4),
        "error_mean": round(statistics.mean(errors), 4),
        "error_max": round(max(errors), 4),
        "standard_deviation_of_logprobs": round(statistics.pstdev(exact), 4),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
