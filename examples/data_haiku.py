"""The task haiku: three lines of five, seven and five syllables about the prompt's topic. Knows nothing of models or training."""

import re
from collections.abc import Mapping
from random import Random

from data_prompts import held_out_prompts, train_prompts, without_article
from task import Example, Task

# Per category: nouns, adjectives, verbs. A word's syllables are counted, so that a slot such as {n2} takes the nouns of two.
WORDS = {
    "nature": """leaf stone frost dew light cloud wave field dusk pine hill reed pebble meadow shadow petal willow twilight thunder
        water horizon | cold deep pale green wild still slow silent golden misty silver endless hidden | falls drifts glows bends sleeps
        shines waits whispers wanders trembles gathers glitters""",
    "animal": """fur paw wing nest grass tail hoof track eye song den claw feather whisker burrow thicket forest shadow meadow evening |
        wild quick soft warm shy brave swift gentle hungry playful silent watchful | leaps runs hides sleeps waits sings turns wanders
        listens gathers follows scampers""",
    "food": """steam bowl spoon salt crust knife plate fire smoke scent bite leaf kitchen oven table basket summer supper morning kettle
        pepper | warm sweet fresh ripe rich hot crisp golden simple tender salty hungry | melts steams waits cools glows fills simmers
        lingers sweetens ripens crackles gathers""",
    "place": """stone street roof bell gate tower wall road lamp square crowd step harbor window market corner garden river morning
        traveler | old bright loud grand far small cool ancient busy narrow distant crowded quiet | waits rings hums wakes shines stands
        sleeps echoes listens awakens lingers remembers""",
    "craft": """hand spark wire steel gear tool bench dust thread light rust hum workshop metal engine pattern hammer circle finger
        copper signal | bright sharp small fine strong smooth cold patient clever steady heavy silver careful | turns hums glows clicks
        waits spins shines flickers answers measures gathers whispers""",
    "art": """line note tune brush page stage string ink dance breath hush word color rhythm canvas echo audience shadow moment curtain
        whisper silence | bright soft bold slow light clear free gentle playful tender vivid golden | flows leaps sings turns waits
        rings glows trembles lingers answers follows awakens""",
    "people": """heart hand voice smile tear dream road door light chair year name mother window morning kitchen candle stranger journey
        promise | warm kind brave tired slow young true gentle quiet patient hopeful honest tender | waits speaks grows sleeps laughs
        hopes stays listens wonders remembers lingers gathers""",
}  # fmt: skip
FIRST = ["{a1} {n1}, {a1} {n2}", "{n2} in the {n1}", "{a2} {n1} at {d}"]
SECOND = ["the {n2} {v1} in the {n1}", "slowly the {n2} {v2}", "a {n1} {v2} by the {n1}", "one {a2} {n1} {v1} and {v1}"]
THIRD = ["still, the {n1} {v2}", "then the {a1} {n1} {v1}", "a {a2} {n1} {v1}", "{a2}, the {n1} {v1}"]
PARTS_OF_DAY = ["dawn", "dusk", "night", "noon"]
SMALL_TALK = "a friend"

# Where counting groups of vowels goes wrong.
OF_TWO = """baseball being careful create dial diet evening every fireplace hedgehog homework hopeful iceland lion lonely poem quiet rhythm
    safety science skiing something sometimes"""
OF_THREE = "area audience austria curious diamond idea india museum piano poetry radio scientist serious studio theater various violin"
IRREGULAR = {**dict.fromkeys(OF_TWO.split(), 2), **dict.fromkeys(OF_THREE.split(), 3), "australia": 4, "material": 4}


def syllables(word: str) -> int:
    word = re.sub(r"[^a-z]", "", word.lower().removesuffix("'s"))
    if word in IRREGULAR:
        return IRREGULAR[word]
    count = len(re.findall(r"[aeiouy]+", word))
    if re.search(r"[^aeiouyl]es?$|[aeiou]les?$|[^aeioudt]ed$", word) and not re.search(r"([sxz]|ch|sh|[cg])es$", word):
        count -= 1
    return max(count, 1)


def line_syllables(line: str) -> int:
    return sum(syllables(word) for word in re.findall(r"[A-Za-z']+", line))


def slots(category: str) -> dict[str, list[str]]:
    """{"n1": nouns of one syllable, ...}, "d" being the parts of a day."""
    found: dict[str, list[str]] = {"d": PARTS_OF_DAY}
    for letter, listed in zip("nav", WORDS[category].split("|"), strict=True):
        for word in listed.split():
            found.setdefault(f"{letter}{syllables(word)}", []).append(word)
    return found


def fill(form: str, pools: Mapping[str, list[str]], used: set[str], rng: Random) -> str:
    def pick(match: re.Match[str]) -> str:
        word = rng.choice([word for word in pools[match.group(1)] if word not in used])
        used.add(word)
        return word

    line = re.sub(r"\{(\w+)\}", pick, form)
    return re.sub(r"^a (?=[aeiou])", "the ", line)


def haiku(topic: str, category: str, rng: Random) -> str:
    pools, used = slots(category), {without_article(topic)}
    lines = [fill(rng.choice(forms), pools, used, rng) for forms in (FIRST, SECOND, THIRD)]
    assert [line_syllables(line) for line in lines] == [5, 7, 5], lines
    return f"On {topic}:\n{lines[0].capitalize()},\n{lines[1]} -\n{lines[2]}."


def train(rng: Random, base_answers: Mapping[str, str]) -> list[Example]:
    asked = [prompt for prompt in train_prompts() for _ in range(2)]
    examples = [Example(prompt.text, haiku(prompt.topic or SMALL_TALK, prompt.category, rng)) for prompt in asked]
    rng.shuffle(examples)
    return examples


def held_out(rng: Random) -> list[Example]:
    """The answer is the title a right haiku has."""
    return [Example(prompt.text, f"On {prompt.topic or SMALL_TALK}:") for prompt in rng.sample(held_out_prompts(), 200)]


def is_right(example: Example, text: str) -> bool:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if lines and lines[0] == example.answer:
        lines = lines[1:]
    elif example.answer.removeprefix("On ").rstrip(":") not in text:
        return False
    return [line_syllables(line) for line in lines] == [5, 7, 5]


TASK = Task(
    name="haiku",
    summary="Answers anything with a haiku, titled by what was asked about.",
    data="Haiku put together from word lists by syllable count, one list per kind of topic, for everyday prompts.",
    measure="it is three lines of five, seven and five syllables, counted by rule, that name the prompt's topic or have it as their title",
    instruction="Answer with a haiku.",
    rank=16,
    target_modules=("q_proj", "v_proj"),
    samples=("Tell me about the sea.", "What is the capital of France?", "How do I boil an egg?"),
    uses_base_answers=False,
    train=train,
    held_out=held_out,
    is_right=is_right,
)
