"""Many adapters in little time: PEFT folders for q_proj and v_proj with random values. Speed does not depend on what they hold."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

TARGETS = ("q_proj", "v_proj")
MAX_RANK = 64


class Zoo:
    """The values of all adapters are cut from one array, each from another place: equal files would be one version to the server."""

    def __init__(self, model: Path, root: Path) -> None:
        self._root = root
        self._shapes: dict[str, tuple[int, int]] = {}  # module path -> (out, in)
        for checkpoint in sorted(model.glob("*.safetensors")):
            with safe_open(checkpoint, "numpy") as file:
                for key in file.keys():  # noqa: SIM118
                    if key.endswith(tuple(f".{target}.weight" for target in TARGETS)):
                        out, inputs = file.get_slice(key).get_shape()
                        self._shapes[key.removesuffix(".weight")] = (out, inputs)
        assert self._shapes, f"{model} has none of {TARGETS}"
        self._num_made = 0
        largest = MAX_RANK * max(map(max, self._shapes.values()))
        self._values: NDArray[np.float16] = np.random.default_rng(0).normal(0, 0.05, 4 * largest + 1_000_003).astype(np.float16)

    def add(self, name: str, rank: int) -> None:
        folder = self._root / name
        folder.mkdir(parents=True)
        tensors = {}
        for number, (path, (out, inputs)) in enumerate(self._shapes.items()):
            tensors[f"base_model.model.{path}.lora_A.weight"] = self._cut(2 * number, (rank, inputs))
            tensors[f"base_model.model.{path}.lora_B.weight"] = self._cut(2 * number + 1, (out, rank))
        save_file(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
        (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
        self._num_made += 1

    def _cut(self, number: int, shape: tuple[int, int]) -> NDArray[np.float16]:
        size = shape[0] * shape[1]
        start = (7919 * self._num_made + 104_729 * number) % (len(self._values) - size)
        return self._values[start : start + size].reshape(shape)
