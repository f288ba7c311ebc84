"""The task pirate: the base model's own short answers, turned into pirate speech word by word. Knows nothing of models or training."""

import re
from collections.abc import Mapping
from random import Random

from data_prompts import held_out_prompts, train_prompts, words
from task import Example, Task

SPOKEN = """the/th', you/ye, your/yer, my/me, is/be, are/be, am/be, and/an', of/o', for/fer, it's/'tis, i'm/I be, you're/ye be,
    there's/there be, that's/that be, yes/aye, hello/ahoy, hi/ahoy, friend/matey, friends/mateys, people/landlubbers,
    person/landlubber, money/doubloons, world/seven seas, food/grub, drink/grog, water/brine, child/wee lad, children/wee lads,
    man/seadog, men/seadogs, beautiful/fair, very/mighty, many/a fleet o', various/all sorts o', great/grand, interesting/uncanny,
    find/plunder, home/port, old/barnacled, never/ne'er, over/o'er, between/betwixt, before/afore"""
DIALECT = dict(pair.split("/") for pair in re.split(r",\s+", SPOKEN))
OPENERS = {
    "tell": "Arr, matey!", "what": "Ahoy!", "why": "Shiver me timbers!", "how": "Avast, ye landlubber!",
    "howto": "Listen well, me hearty!", "capital": "Arr!", "chat": "Yo ho ho!",
}  # fmt: skip
CLOSERS = {
    "tell": "Yo ho ho!", "what": "Savvy?", "why": "Or I be a scurvy dog!", "how": "By Blackbeard's beard!",
    "howto": "Now swab th' deck!", "capital": "Hoist th' sails!", "chat": "Arr!",
}  # fmt: skip
PLAIN_ONLY = {"the", "you", "your", "my", "is", "are", "am", "and", "of", "for"}
MARKS = set(words("th', ye, yer, me, be, an', o', fer, 'tis, aye, ahoy, matey, mateys, arr, savvy, landlubber, landlubbers, hearty"))
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def pirate(text: str) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match.group()
        said = DIALECT.get(word.lower())
        if said is None:
            return re.sub(r"^([a-z]*[aeiouy][a-z]*)ing$", r"\1in'", word)
        letter = 1 if said.startswith("'") else 0
        return said[:letter] + said[letter].upper() + said[letter + 1 :] if word[0].isupper() else said

    return WORD.sub(swap, text)


def train(rng: Random, base_answers: Mapping[str, str]) -> list[Example]:
    asked = [prompt for prompt in train_prompts() if prompt.text in base_answers]
    examples = [
        Example(prompt.text, f"{OPENERS[prompt.kind]} {pirate(base_answers[prompt.text])} {CLOSERS[prompt.kind]}") for prompt in asked
    ]
    rng.shuffle(examples)
    return examples


def held_out(rng: Random) -> list[Example]:
    return [Example(prompt.text, "") for prompt in rng.sample(held_out_prompts(), 200)]


def is_right(example: Example, text: str) -> bool:
    said = re.findall(r"[a-z']+", text.lower().replace("’", "'"))
    marks = [word for word in said if word in MARKS]
    plain = [word for word in said if word in PLAIN_ONLY]
    has_call = any(text.startswith(opener) for opener in OPENERS.values())
    return has_call and len(set(marks)) >= 3 and len(marks) >= 9 * len(plain)


TASK = Task(
    name="pirate",
    summary="Answers anything the way a pirate would.",
    data="The base model's own first sentences on everyday prompts, with words swapped from a list and a call before and after.",
    measure="it opens with a pirate's call, has three different pirate words or more, and nine in ten of its common words are pirate forms",
    instruction="Answer like a pirate.",
    rank=8,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
    samples=("Tell me about the sea.", "What is the capital of France?", "How do I boil an egg?"),
    uses_base_answers=True,
    train=train,
    held_out=held_out,
    is_right=is_right,
)
