"""Everyday prompts shared by the tasks: templates filled from word lists. Knows nothing of models or of any task's answers."""

from dataclasses import dataclass

# As each stands after "about", grouped by the imagery that fits it.
TOPICS: dict[str, str] = {
    "nature": """the moon, the rain, a mountain, a river, autumn leaves, snow, the wind, a forest, a desert, the stars, a volcano,
        lightning, a waterfall, an island, a rainbow, clouds, the sunrise, winter, spring, summer, a garden, a rose, an oak tree, a
        lake, a beach, a glacier, a storm, fog, the tide, a coral reef, the jungle, a meadow, the northern lights, a comet, moss, a
        canyon, a swamp, ice""",
    "animal": """cats, dogs, horses, an elephant, a whale, bees, butterflies, owls, penguins, a wolf, a tiger, ants, spiders, a frog,
        dolphins, an eagle, a turtle, a fox, sheep, a rabbit, parrots, a shark, crows, a hedgehog, cows, a crocodile, a snail, swans, a
        bear, a mouse, squirrels, an octopus, chickens, goats, a lizard, salmon""",
    "food": """bread, coffee, tea, chocolate, cheese, apples, rice, soup, pizza, honey, an orange, salt, pasta, a potato, breakfast, ice
        cream, bananas, pancakes, butter, garlic, wine, bacon, a sandwich, sugar, tomatoes, curry, olive oil, cake, beans, a lemon,
        onions, yogurt, mushrooms, pepper, strawberries, dinner""",
    "place": """London, Paris, Tokyo, Rome, New York, a village, a harbor, a castle, a museum, a library, a market, a hospital, a
        school, Egypt, Japan, Brazil, India, Canada, a farm, an airport, a bridge, a lighthouse, a cathedral, a train station, Iceland,
        Africa, Australia, a theater, a park, Venice, Berlin, a prison, a hotel, Mexico, Norway, China""",
    "craft": """computers, a bicycle, a clock, electricity, the telephone, a robot, the internet, a telescope, a train, an airplane, a
        rocket, a camera, a compass, paper, glass, iron, a wheel, a candle, batteries, software, a car, a microscope, a hammer, plastic,
        an engine, a satellite, money, a keyboard, a mirror, an umbrella, a door, shoes, a needle, a ladder, steam, a lamp""",
    "art": """music, painting, poetry, dancing, a guitar, the piano, a violin, movies, a novel, a song, drums, opera, photography,
        chess, football, a story, theater, a poem, jazz, sculpture, a letter, a book, a game, tennis, swimming, running, yoga, singing,
        knitting, drawing, a dream, silence, a puzzle, language, fashion, a joke""",
    "people": """friendship, love, a teacher, a doctor, a farmer, a family, a king, children, sleep, fear, happiness, courage, memory,
        work, a baker, a soldier, a scientist, an artist, old age, a mother, patience, anger, a neighbor, hope, learning, health, a
        nurse, history, time, kindness, a sailor, a queen, a birthday, luck, freedom, a wedding""",
}
HELD_OUT_TOPICS: dict[str, list[str]] = {
    "nature": ["the sea", "the sun", "a flower", "thunder", "a valley", "sand"],
    "animal": ["birds", "a lion", "fish", "a donkey", "a crab", "monkeys"],
    "food": ["milk", "a carrot", "cookies", "lunch", "a peach", "noodles"],
    "place": ["France", "Madrid", "a church", "a city", "a tunnel", "Greece"],
    "craft": ["a hat", "radio", "a boat", "a knife", "a window", "a pencil"],
    "art": ["the flute", "a picture", "a mask", "a circus", "skiing", "cooking"],
    "people": ["a father", "sadness", "a student", "a writer", "trust", "a winner"],
}
ABOUT = [
    ("tell", "Tell me about {}."),
    ("tell", "Describe {}."),
    ("tell", "Say something about {}."),
    ("tell", "Talk to me about {}."),
    ("tell", "Explain {} to me."),
    ("tell", "Give me a fact about {}."),
    ("what", "What do you know about {}?"),
    ("what", "What do you think of {}?"),
    ("what", "What is special about {}?"),
    ("what", "What should I know about {}?"),
    ("why", "Why do people care about {}?"),
    ("why", "Why would anyone study {}?"),
    ("how", "How would you describe {}?"),
    ("how", "How would you explain {} to a child?"),
]
CAPITALS = "Italy, Spain, Japan, Egypt, Canada, Germany, Peru, Kenya, Norway, Portugal, China, Russia, Austria, Cuba"
HELD_OUT_CAPITALS = ["France", "Greece", "Poland", "England", "Hungary"]
HOW_TO = """bake bread, grow tomatoes, learn chess, clean a mirror, write a letter, ride a bicycle, train a dog, make soup, paint a
    wall, plant a tree, cook rice, fix a chair, save money, read a map, catch a train, tie a knot, build a fire, make coffee, draw a
    face, wash a car, learn music, find a job, sharpen a saw, fold a shirt, take a nap, start a garden, brew tea, feed a cat, plan a
    trip, write a poem"""
HELD_OUT_HOW_TO = ["boil an egg", "make jam", "learn German", "fly a kite", "light a match", "open a jar"]
CHAT = """Hello!|Hi there.|Good morning!|Good evening.|How are you today?|Who are you?|What is your name?|Can you help me?|I am tired.
Thank you for your help.|I had a long day.|Tell me a joke.|What can you do?|I am hungry.|Goodbye!|I am happy today.|Do you like me?
What should I do today?|Give me some advice.|I feel lonely.|Tell me something new.|Are you a robot?|I need a break.
What is the meaning of life?"""
HELD_OUT_CHAT = ["Hey, how is it going?", "I am bored.", "Do you have a name?", "Good night!", "Tell me a story.", "I lost my keys."]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    kind: str  # tell, what, why, how, capital, howto or chat
    category: str  # a key of TOPICS
    topic: str  # what it is about, as in the prompt; "" in small talk


def words(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]  # a part may run over a line's end


def without_article(topic: str) -> str:
    first, _, rest = topic.partition(" ")
    return rest if first in ("a", "an", "the") else topic


def nouns() -> list[str]:
    return [without_article(topic) for listed in TOPICS.values() for topic in words(listed)]


def _build(topics: dict[str, list[str]], capitals: list[str], how_to: list[str], chat: list[str]) -> list[Prompt]:
    prompts = [
        Prompt(form.format(topic), kind, category, topic) for category, listed in topics.items() for topic in listed for kind, form in ABOUT
    ]
    prompts += [Prompt(f"What is the capital of {name}?", "capital", "place", name) for name in capitals]
    for task in how_to:
        topic = task.split(" ", 1)[1]
        prompts += [Prompt(form.format(task), "howto", "craft", topic) for form in ("How do I {}?", "How can I {}?", "Teach me how to {}.")]
    return prompts + [Prompt(text, "chat", "people", "") for text in chat]


def train_prompts() -> list[Prompt]:
    topics = {category: words(listed) for category, listed in TOPICS.items()}
    return _build(topics, words(CAPITALS), words(HOW_TO), CHAT.replace("\n", "|").split("|"))


def held_out_prompts() -> list[Prompt]:
    """No topic, country, task or greeting of these is in train_prompts()."""
    return _build(HELD_OUT_TOPICS, HELD_OUT_CAPITALS, HELD_OUT_HOW_TO, HELD_OUT_CHAT)
