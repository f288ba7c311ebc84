"""What sampling adds to a decode step on a GPU: `python -m benchmarks.gpu_sampling --out FILE`

Llama-3.1-8B's shape with random weights (128,256 tokens), one rank in this process, every row sampled in the same way. Milliseconds a step.
"""

import argparse
import json
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.gpu_profile import NUM_STEPS, Decoding, kernels, step_ms
from benchmarks.llama_8b import Case
from loray.models.step import Sampling

KINDS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_k 50": Sampling(temperature=0.8, top_k=50),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top_k 50, top_p 0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95),
    "typical_p 0.95": Sampling(temperature=0.8, typical_p=0.95),
    "repetition_penalty 1.1": Sampling(repetition_penalty=1.1),
    "5 alternatives": Sampling(num_alternatives=5),
}
ROWS = (8, 32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/loray"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    decoding = Decoding(options.folder, max(ROWS))
    results = environment("python -m benchmarks.gpu_sampling --out FILE")
    for rows in ROWS:
        for kind, sampling in KINDS.items():
            decoding.begin(Case(rows, 0), sampling)
            results[f"{rows} rows, {kind}, ms a step"] = milliseconds = round(step_ms(decoding), 3)
            print(f"{rows} rows, {kind}: {milliseconds} ms a step", flush=True)
            if options.kernels:
                for name, spent in kernels(lambda: decoding.decode(NUM_STEPS), NUM_STEPS).most_common(12):
                    print(f"  {spent:7.3f}  {name}")
    options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
