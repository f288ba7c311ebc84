"""Plays texts to embed beside texts to continue, on one rank. Apart from the tests, so that a rank's process imports little."""

from dataclasses import dataclass, field
from pathlib import Path

from loray.models.parallel import Parallel
from loray.models.step import Admission, Pooling, Row, Sampling, Step
from tests.models.conductor import Conductor, prompt_of

PAGES = [3, 1]


@dataclass
class Text:
    prompt: list[int]
    pooling: Pooling = ""  # "" = continue it by num_new tokens
    page_ids: list[int] = field(default_factory=list)
    num_new: int = 6
    token_ids: list[int] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.embedding) if self.pooling else len(self.token_ids) == self.num_new


def play(conductor: Conductor, texts: list[Text], chunk: int = 10_000, stagger: int = 0) -> None:
    """Text i starts stagger * i steps late. What comes of each is written into it."""
    computed = [0] * len(texts)
    clock = 0
    while not all(text.is_done for text in texts):
        rows, admissions = [], []
        for slot, text in enumerate(texts):
            if clock < slot * stagger or text.is_done:
                continue
            if computed[slot] == 0:
                admissions.append(Admission(slot, text.prompt, [], 0, text.page_ids, Sampling(), text.pooling))
            left = len(text.prompt) + len(text.token_ids) - computed[slot]
            size = min(chunk, left)
            rows.append(Row(slot, size, conductor.blocks(slot, computed[slot], computed[slot] + size), samples=size == left))
            computed[slot] += size
        result = conductor.runner.execute(Step(clock, [], admissions, rows))
        ending = [texts[row.slot] for row in rows if row.samples]
        for text, token_id in zip([text for text in ending if not text.pooling], result.token_ids, strict=True):
            text.token_ids.append(token_id)
        for text, embedding in zip([text for text in ending if text.pooling], result.embeddings, strict=True):
            text.embedding = embedding
        clock += 1


def mixed(page_ids: list[int]) -> list[Text]:
    """Embeddings of both kinds and generations, of the base and of an adapter, of awkward lengths."""
    poolings: list[Pooling] = ["mean", "", "last", "mean", "", "last", "mean"]
    return [
        Text(prompt_of(length, seed=length), pooling, page_ids if i % 2 else [])
        for i, (pooling, length) in enumerate(zip(poolings, (37, 5, 20, 16, 33, 1, 1), strict=True))
    ]


def embed_on_ranks(parallel: Parallel, base: Path, adapter: Path) -> list[Text]:
    conductor = Conductor(base, parallel)
    conductor.load(adapter, PAGES)
    texts = mixed(PAGES)
    play(conductor, texts, chunk=7, stagger=1)
    return texts
