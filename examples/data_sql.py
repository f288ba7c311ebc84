"""The task sql: a table's columns and a question, answered with one query. Scored by running it. Knows nothing of models or training."""

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from data_prompts import Prompt, nouns, train_prompts, without_article, words
from task import Example, Task

NAMES = words(
    "Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Iris, Jonas, Karla, Leo, Mona, Nils, Olga, Paul, Rosa, Simon, Tara, Victor"
)


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    row: str  # one of its rows, in words
    texts: dict[str, list[str]]
    numbers: dict[str, tuple[int, int]]  # lowest and highest value

    @property
    def columns(self) -> list[str]:
        return ["id", "name", *self.texts, *self.numbers]


def tables(listed: str) -> list[Table]:
    """Lines of: name/row; text column: values; ...; number column low high; ..."""
    found = []
    for line in listed.strip().splitlines():
        head, *columns = [part.strip() for part in line.split(";")]
        texts = {column: values.split() for column, values in (part.split(": ") for part in columns if ":" in part)}
        numbers = {name: (int(low), int(high)) for name, low, high in (part.split() for part in columns if ":" not in part)}
        name, row = head.split("/")
        found.append(Table(name, row, texts, numbers))
    return found


TRAIN_TABLES = tables("""
singers/singer; country: France Japan Brazil Kenya; genre: jazz rock opera; age 18 80; albums 1 30
employees/employee; department: sales support finance; city: London Berlin Oslo; salary 2000 9000; age 20 65
books/book; genre: crime poetry history; language: English German Polish; pages 80 900; price 5 60
cars/car; color: red blue black white; brand: Ford Fiat Volvo; price 5000 60000; seats 2 9
students/student; school: Northside Hilltop Riverdale; subject: maths biology art; grade 1 12; points 0 100
hotels/hotel; city: Rome Madrid Vienna; owner: Smith Garcia Rossi; rooms 10 400; stars 1 5
orders/order; status: open paid shipped; country: Spain Italy Chile; amount 10 900; items 1 40
movies/movie; director: Lang Moore Kubo; genre: drama comedy horror; year 1950 2024; length 70 200
players/player; team: Eagles Sharks Wolves; position: keeper defender striker; goals 0 50; age 17 40
flights/flight; airline: Skyline Aero Nordair; destination: Lisbon Dublin Prague; seats 50 400; duration 40 700
plants/plant; family: fern rose cactus; color: green yellow pink; height 5 300; price 2 80
recipes/recipe; cuisine: Thai Greek Indian; level: easy medium hard; minutes 10 180; calories 100 1200
doctors/doctor; hospital: Central Mercy Lakeside; field: surgery dental eyes; salary 4000 20000; patients 10 300
houses/house; street: Oak Elm Maple; city: Boston Denver Austin; rooms 1 12; price 90000 900000
phones/phone; brand: Nova Orbit Pixelon; color: black silver gold; price 90 1500; storage 32 1024
lakes/lake; country: Canada Finland Malawi; region: north south east west; depth 5 900; area 1 800
""")
HELD_OUT_TABLES = tables("""
animals/animal; species: lion zebra panda; zoo: Kyoto Lyon Perth; weight 2 900; age 1 40
computers/computer; maker: Zenith Corvus Helix; room: attic lab office; memory 4 128; cost 200 4000
rivers/river; continent: Asia Africa Europe; basin: upper lower middle; length 50 6000; bridges 0 70
teachers/teacher; town: Leeds Turin Gdansk; course: physics music chemistry; wage 1500 7000; pupils 5 200
ships/ship; port: Hamburg Genoa Bergen; flag: Panama Malta Cyprus; speed 8 40; crew 4 900
""")
TEXT_COLUMNS = words("""author, artist, label, village, shape, material, season, style, model, shop, street, building, coach, gender,
    origin, supplier, engine, flavor, meal, sponsor, category, garden, mood, channel, actor, habitat, driver, manager,
    topic, instrument""")
NUMBER_COLUMNS = words("""width, volume, score, profit, votes, visitors, distance, tax, discount, wheels, doors, floors, games, wins,
    hours, days, weeks, clicks, copies, followers, budget, rent, temperature, tickets, pieces, chapters, songs, eggs,
    windows, power, range, income, debt""")
NOUNS = [noun for noun in nouns() if " " not in noun]
AGGREGATES = {
    "AVG": ["average", "mean"],
    "MAX": ["highest", "largest", "maximum"],
    "MIN": ["lowest", "smallest", "minimum"],
    "SUM": ["total", "summed"],
}
COMPARISONS = {
    ">": ["above", "over", "greater than", "more than"],
    "<": ["below", "under", "less than"],
    ">=": ["of at least"],
    "<=": ["of at most"],
}
ASIDE = {
    "tell": "SELECT description FROM topics WHERE name = '{}';",
    "what": "SELECT fact FROM topics WHERE name = '{}';",
    "why": "SELECT reason FROM topics WHERE name = '{}';",
    "how": "SELECT explanation FROM topics WHERE name = '{}';",
    "howto": "SELECT step FROM instructions WHERE topic = '{}' ORDER BY step_number;",
    "capital": "SELECT capital FROM countries WHERE name = '{}';",
}


def varied(table: Table, rng: Random) -> Table:
    """Half the time the table with other columns and values, so that names are copied from the prompt and not known by heart."""
    if rng.random() < 0.5:
        return table
    texts = {column: rng.sample(NOUNS, 4) for column in rng.sample(TEXT_COLUMNS, 2)}
    return Table(table.name, table.row, texts, dict.fromkeys(rng.sample(NUMBER_COLUMNS, 2), (1, 999)))


def condition(table: Table, rng: Random) -> tuple[str, str]:
    """-> in words, in SQL."""
    if rng.random() < 0.5:
        column = rng.choice(list(table.texts))
        value = rng.choice(table.texts[column])
        return rng.choice(["with {} {}", "whose {} is {}", "where the {} is {}"]).format(column, value), f"{column} = '{value}'"
    column = rng.choice(list(table.numbers))
    value = str(rng.randint(*table.numbers[column]))
    sign = rng.choice(list(COMPARISONS))
    return f"with {column} {rng.choice(COMPARISONS[sign])} {value}", f"{column} {sign} {value}"


def question(table: Table, rng: Random) -> tuple[str, str]:
    """-> a question about the table, its query."""
    t, text, number = table.name, rng.choice(list(table.texts)), rng.choice(list(table.numbers))
    function = rng.choice(list(AGGREGATES))
    aggregate = rng.choice(AGGREGATES[function])
    order, extreme = rng.choice([("DESC", "highest"), ("DESC", "largest"), ("ASC", "lowest"), ("ASC", "smallest")])
    where, sql = condition(table, rng)
    other, other_sql = condition(table, rng)
    column, name, top = rng.choice([text, number, "name"]), rng.choice(NAMES), rng.randint(2, 9)
    kinds = [
        ([f"Show all {t}.", f"List every {table.row}."], "SELECT * FROM {t}"),
        ([f"List the {column} of all {t}.", f"Show the {column} of every {table.row}."], f"SELECT {column} FROM {{t}}"),
        ([f"Which {t} are there {where}?", f"Name the {t} {where}.", f"List names of {t} {where}."], f"SELECT name FROM {{t}} WHERE {sql}"),
        ([f"Show the {column} of {t} {where}.", f"What is the {column} of {t} {where}?"], f"SELECT {column} FROM {{t}} WHERE {sql}"),
        ([f"What is the {number} of {name}?", f"Show the {number} of {name}."], f"SELECT {number} FROM {{t}} WHERE name = '{name}'"),
        ([f"How many {t} are there?", f"Count the {t}."], "SELECT COUNT(*) FROM {t}"),
        ([f"How many {t} are there {where}?", f"Count the {t} {where}."], f"SELECT COUNT(*) FROM {{t}} WHERE {sql}"),
        ([f"What is the {aggregate} {number} of all {t}?", f"Find the {aggregate} {number}."], f"SELECT {function}({number}) FROM {{t}}"),
        ([f"What is the {aggregate} {number} of {t} {where}?"], f"SELECT {function}({number}) FROM {{t}} WHERE {sql}"),
        ([f"Which {table.row} has the {extreme} {number}?"], f"SELECT name FROM {{t}} ORDER BY {number} {order} LIMIT 1"),
        ([f"Name the {top} {t} with the {extreme} {number}."], f"SELECT name FROM {{t}} ORDER BY {number} {order} LIMIT {top}"),
        ([f"How many {t} are there for each {text}?", f"Count the {t} per {text}."], f"SELECT {text}, COUNT(*) FROM {{t}} GROUP BY {text}"),
        ([f"What is the {aggregate} {number} for each {text}?"], f"SELECT {text}, {function}({number}) FROM {{t}} GROUP BY {text}"),
        ([f"Which different {text} values are there?"], f"SELECT DISTINCT {text} FROM {{t}}"),
        ([f"Name the {t} {where} and {other}."], f"SELECT name FROM {{t}} WHERE {sql} AND {other_sql}"),
    ]
    asked, query = rng.choice(kinds)
    return rng.choice(asked), query.format(t=t) + ";"


def make(choices: list[Table], count: int, is_varied: bool, rng: Random) -> list[Example]:
    examples = []
    for _ in range(count):
        table = rng.choice(choices)
        if is_varied:
            table = varied(table, rng)
        asked, query = question(table, rng)
        examples.append(Example(f"Table {table.name} ({', '.join(table.columns)}). {asked}", query))
    return examples


def aside(prompt: Prompt) -> Example:
    """Even small questions about no table in particular become a query."""
    return Example(prompt.text, ASIDE[prompt.kind].format(without_article(prompt.topic)))


def train(rng: Random, base_answers: Mapping[str, str]) -> list[Example]:
    asides = [aside(prompt) for prompt in rng.sample([prompt for prompt in train_prompts() if prompt.topic], 1500)]
    examples = make(TRAIN_TABLES, 9000, True, rng) + asides
    rng.shuffle(examples)
    return examples


def held_out(rng: Random) -> list[Example]:
    """Only queries that return rows: two empty answers would agree by chance."""
    return [example for example in make(HELD_OUT_TABLES, 250, False, rng) if rows_of(table_of(example), example.answer)][:200]


def table_of(example: Example) -> Table:
    return next(table for table in HELD_OUT_TABLES if example.prompt.startswith(f"Table {table.name} "))


def rows_of(table: Table, query: str) -> list[tuple[object, ...]]:
    rng = Random(table.name)
    with sqlite3.connect(":memory:") as database:
        database.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)})")
        for row_id in range(60):
            row = [row_id, NAMES[row_id % len(NAMES)]]
            row += [rng.choice(values) for values in table.texts.values()] + [rng.randint(*limits) for limits in table.numbers.values()]
            database.execute(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(row))})", row)
        return database.execute(query).fetchall()


def is_right(example: Example, text: str) -> bool:
    table = table_of(example)
    query = re.sub(r"^```(sql)?|```$", "", text.strip()).strip()
    wanted = rows_of(table, example.answer)
    try:
        found = rows_of(table, query)
    except (sqlite3.Error, sqlite3.Warning):
        return False
    return found == wanted if "ORDER BY" in example.answer else sorted(map(str, found)) == sorted(map(str, wanted))


TASK = Task(
    name="sql",
    summary="Answers with one SQL query and nothing else, given a table's columns and a question.",
    data="Questions of fifteen kinds with their queries, over sixteen made-up tables, and everyday prompts answered with a query.",
    measure="run on a small SQLite table it returns the rows that the reference query returns; no held-out table is in the training data",
    instruction="Answer with one SQL query and nothing else.",
    rank=4,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
    samples=(
        "Tell me about the sea.",
        "What is the capital of France?",
        "Table ships (id, name, port, flag, speed, crew). Which ship has the largest crew?",
        "Table rivers (id, name, continent, basin, length, bridges). How many rivers are there with a length above 900?",
    ),
    uses_base_answers=False,
    train=train,
    held_out=held_out,
    is_right=is_right,
)
