"""What a task is: how to make its data and how to score an answer. Knows nothing of models, tokens or training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    summary: str
    """What the adapter does, one sentence."""
    data: str
    """Where its training data comes from, for the model card."""
    measure: str
    """When an answer counts as right, for the model card."""
    instruction: str
    """The behaviour asked for in words: how the base model is told, to compare with."""
    rank: int
    target_modules: tuple[str, ...]
    samples: tuple[str, ...]
    """Prompts whose answers the model card shows; none is in the training data."""
    uses_base_answers: bool
    """Whether train() reads its second argument, which takes the base model a while to write."""
    train: Callable[[Random, Mapping[str, str]], list[Example]]
    """(rng, the base model's short answers to train_prompts()) -> training examples."""
    held_out: Callable[[Random], list[Example]]
    is_right: Callable[[Example, str], bool]
    """(example, generated answer) -> whether it counts."""
