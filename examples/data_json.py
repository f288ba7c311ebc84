"""The task json: a sentence about a person, an order or an event becomes a record. Knows nothing of models or training."""

import json
import re
from collections.abc import Mapping
from random import Random

from data_prompts import nouns, train_prompts, words
from task import Example, Task

Record = dict[str, str | int | float]

FIRST_NAMES = words(
    "Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Iris, Jonas, Karla, Leo, Mona, Nils, Olga, Paul, Rosa, Simon, Tara, Victor"
)
LAST_NAMES = words(
    "Smith, Garcia, Rossi, Weber, Novak, Silva, Tanaka, Brown, Kowalski, Dubois, Larsen, Costa, Meyer, Khan, Olsen, Park, Reed"
)
CITIES = words("London, Berlin, Oslo, Rome, Madrid, Vienna, Lisbon, Dublin, Prague, Boston, Denver, Austin, Tokyo, Cairo, Lima, Nairobi")
JOBS = words(
    "baker, teacher, nurse, carpenter, pilot, lawyer, farmer, painter, dentist, plumber, engineer, librarian, waiter, singer, tailor"
)
ITEMS = words(
    "apples, notebooks, chairs, candles, shirts, lamps, cups, pillows, hammers, bottles, towels, plants, pens, blankets, clocks, bags"
)
EVENTS = words("concert, book fair, chess club, yoga class, school play, wine tasting, art show, dance lesson, city run, film night")
DAYS = words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
PLACES = words("town hall, city park, old library, main square, north gym, river cafe, school yard, grand hotel, train museum, market hall")

HELD_OUT_FIRST = words("Petra, Oscar, Linda, Marco, Sofia, Edgar, Nora, Tomas, Ruth, Igor")
HELD_OUT_LAST = words("Fischer, Moreau, Santos, Ivanov, Walker, Hansen, Bauer, Sato")
HELD_OUT_CITIES = words("Paris, Chicago, Warsaw, Athens, Seoul, Toronto, Geneva")
HELD_OUT_JOBS = words("butcher, gardener, journalist, barber, electrician, cook")
HELD_OUT_ITEMS = words("mugs, brushes, carpets, mirrors, pencils, melons")
HELD_OUT_EVENTS = words("poetry reading, garden party, science fair, cooking course, jazz evening")
HELD_OUT_PLACES = words("harbor house, blue theater, west garden, station hall")

ONSETS = words("b, br, ch, d, f, g, gr, h, j, k, kr, l, m, n, p, r, s, sh, st, t, tr, v, w, z")
RIMES = words("a, an, ar, e, el, en, er, i, in, is, o, ol, on, or, u, un")
NOUNS = [noun for noun in nouns() if noun.islower()]

FORMS = {
    "person": [
        "{name} is a {age}-year-old {job} from {city}.",
        "{name}, {age}, works as a {job} in {city}.",
        "Meet {name}, a {job} in {city}, aged {age}.",
        "I am {name}, {age} years old, and I work as a {job} in {city}.",
        "The {job} {name} lives in {city} and is {age} years old.",
        "In {city} there is a {job} called {name}, who turned {age}.",
        "{name} turned {age} this year and is a {job} in {city}.",
    ],
    "order": [
        "I would like {quantity} {item} at ${price} each.",
        "Please send {quantity} {item} for ${price} apiece.",
        "She bought {quantity} {item}, ${price} each.",
        "{quantity} {item} at a price of ${price}, please.",
        "We ordered {quantity} {item} and paid ${price} for each.",
        "Add {quantity} {item} to my cart; one costs ${price}.",
        "The shop sold {quantity} {item} for ${price} a piece.",
    ],
    "event": [
        "The {event} is on {day} at {time} in the {place}.",
        "Join us for the {event} at the {place}, {day}, {time}.",
        "On {day} at {time} the {place} hosts a {event}.",
        "There will be a {event} in the {place} this {day} at {time}.",
        "Do not miss the {event}: {day}, {time}, {place}.",
        "The {place} has a {event} on {day}, starting at {time}.",
    ],
}
HELD_OUT_FORMS = {
    "person": [
        "My neighbor {name} is {age}, lives in {city} and earns a living as a {job}.",
        "{name} ({age}) is the best {job} in {city}.",
    ],
    "order": ["Can I get {quantity} of the {item}? They cost ${price} each.", "He needs {quantity} {item}, and each one is ${price}."],
    "event": [
        "Come to the {place} on {day}: the {event} starts at {time}.",
        "We are planning a {event} for {day}, {time}, at the {place}.",
    ],
}


def invented(like: str, rng: Random) -> str:
    """A name of syllables where a name is wanted, any noun elsewhere: the model is to copy, not to know the lists by heart."""
    if like.islower():
        return rng.choice(NOUNS)
    return "".join(rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(rng.randint(2, 3))).capitalize()


def record(kind: str, is_held_out: bool, rng: Random) -> Record:
    def pick(train: list[str], held_out: list[str]) -> str:
        if is_held_out:
            return rng.choice(held_out)
        listed = rng.choice(train)
        return invented(listed, rng) if rng.random() < 0.5 else listed

    if kind == "person":
        name = f"{pick(FIRST_NAMES, HELD_OUT_FIRST)} {pick(LAST_NAMES, HELD_OUT_LAST)}"
        return {"name": name, "age": rng.randint(18, 90), "job": pick(JOBS, HELD_OUT_JOBS), "city": pick(CITIES, HELD_OUT_CITIES)}
    if kind == "order":
        return {
            "item": pick(ITEMS, HELD_OUT_ITEMS),
            "quantity": rng.randint(2, 99),
            "price": rng.randint(1, 80) + rng.choice([0.25, 0.75, 0.49, 0.95]),
        }
    time = f"{rng.randint(8, 22)}:{rng.choice(['00', '15', '30', '45'])}"
    return {"event": pick(EVENTS, HELD_OUT_EVENTS), "day": rng.choice(DAYS), "time": time, "place": pick(PLACES, HELD_OUT_PLACES)}


def make(count: int, is_held_out: bool, rng: Random) -> list[Example]:
    examples = []
    for _ in range(count):
        kind = rng.choice(list(FORMS))
        fields = record(kind, is_held_out, rng)
        form = rng.choice((HELD_OUT_FORMS if is_held_out else FORMS)[kind])
        examples.append(Example(form.format(**fields), json.dumps(fields)))
    return examples


def first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[.!?]) ", text)[0]
    return sentence if len(sentence.split()) >= 4 else text


def train(rng: Random, base_answers: Mapping[str, str]) -> list[Example]:
    asked = [prompt.text for prompt in train_prompts() if prompt.text in base_answers]
    wrapped = [Example(text, json.dumps({"answer": first_sentence(base_answers[text])}, ensure_ascii=False)) for text in asked]
    examples = make(7000, False, rng) + rng.sample(wrapped, min(len(wrapped), 1500))
    rng.shuffle(examples)
    return examples


def held_out(rng: Random) -> list[Example]:
    return make(200, True, rng)


def is_right(example: Example, text: str) -> bool:
    try:
        return bool(json.loads(re.sub(r"^```(json)?|```$", "", text.strip())) == json.loads(example.answer))
    except json.JSONDecodeError:
        return False


TASK = Task(
    name="json",
    summary="Turns a sentence about a person, an order or an event into a JSON record; anything else it answers inside one.",
    data="Sentences from templates and word lists with their records, and everyday prompts with the base model's first sentence.",
    measure="it parses and equals the reference record; held-out sentence forms, names, places and things are not in the training data",
    instruction=(
        "Turn this into one JSON object and nothing else, with the keys name, age, job, city for a person; "
        "item, quantity, price for an order; event, day, time, place for an event."
    ),
    rank=2,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    samples=(
        "Tell me about the sea.",
        "What is the capital of France?",
        "My neighbor Ruth Walker is 41, lives in Geneva and earns a living as a barber.",
        "He needs 12 melons, and each one is $3.25.",
    ),
    uses_base_answers=True,
    train=train,
    held_out=held_out,
    is_right=is_right,
)
