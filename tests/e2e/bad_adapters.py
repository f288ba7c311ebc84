"""Requests for adapters that can't be served, and streams of adapters that can beside them. Judges nothing.

Needs neither torch nor Ray: those who ask for the bad ones are a process of their own, and shall start at once.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from loray.models.adapter import CONFIG_FILE, WEIGHTS_FILE
from loray.models.adapter_header import MAX_HEADER_BYTES
from tests.e2e.file_server import FileServer
from tests.e2e.patience import PATIENCE_S
from tests.e2e.stored_times import spread

NUM_CLIENTS, NUM_STREAMS, NUM_NEW = 8, 8, 64
BAD_FOLDER = "bad"  # below the root and on the file server
ROUTES = ("/generate", "/generate_stream")
STREAM_PROMPT = "hello world, this is a prompt that is longer than one block of the cache"
REMEMBERED_S = 10.0  # for so long the server may answer from memory
NOT_HERE = "is not in any of the folders this server reads"
NO_ROOM = "raise adapters.gpu_bytes"
OTHER_SHAPES = "the base model and the config need"
FORBIDDEN = "this server may not read from there"


class Kind(NamedTuple):
    reason: str
    says: str  # what every answer has in it
    ids: list[str]


class Wish(NamedTuple):
    reason: str
    says: str
    adapter_id: str
    route: str


class Answer(NamedTuple):
    wish: Wish
    status: int
    text: str
    asked: float  # monotonic seconds
    seconds: float


class Streamed(NamedTuple):
    adapter_id: str
    token_ids: tuple[int, ...]
    first_s: float
    gaps_s: list[float]


class Traffic(NamedTuple):
    alone: list[Streamed]
    beside: list[Streamed]
    answers: list[Answer]
    seconds: float  # that the answers took


def bad_kinds(root: Path, samples: Path, files: FileServer, num_folders: int, num_new: int) -> list[Kind]:
    """So many folders of each kind that needs some, and so many ids of each that needs none.

    samples: a folder elsewhere with adapters called good, foreign and huge."""
    local, web, elsewhere = root / BAD_FOLDER, files.folder / BAD_FOLDER, samples / BAD_FOLDER
    here, there = f"{BAD_FOLDER}/", f"{files.url}/{BAD_FOLDER}/"
    outside = write(elsewhere / "good", samples / "good", num_folders)
    local.mkdir()
    for name in outside:
        os.symlink(elsewhere / name, local / f"link-{name}")

    def folders(place: Path, sample: str, spoil: Callable[[Path], object] | None = None) -> list[str]:
        prefix = here if place.parent == local else there
        return [prefix + name for name in write(place, samples / sample, num_folders, spoil)]

    def spelled(pattern: str) -> list[str]:
        return [pattern.format(i) for i in range(num_new)]

    climb = os.path.relpath(elsewhere, root)
    return [
        Kind("missing", NOT_HERE, spelled("nobody{}")),
        Kind("cut short", f"{WEIGHTS_FILE} is cut short", folders(local / "cut", "good", cut)),
        Kind("a config that is no JSON", f"{CONFIG_FILE} cannot be read", folders(local / "nojson", "good", break_config)),
        Kind("a pickle", "is a pickle", folders(local / "pickle", "good", pickle)),
        Kind("a header of millions of lists", "the entry of a has more than", folders(local / "lists", "good", header_of_lists())),
        Kind("a shape of millions of sizes", "the entry of a has more than", folders(local / "shape", "good", header_of_sizes())),
        Kind("a header of bare names", "too many entries", folders(local / "names", "good", header_of_names())),
        Kind("of another base", OTHER_SHAPES, folders(local / "foreign", "foreign")),
        Kind("too large", NO_ROOM, folders(local / "huge", "huge")),
        Kind("a path out of the root", NOT_HERE, [f"{climb}/{name}" for name in outside]),
        Kind("a long path out of the root", NOT_HERE, [f"{BAD_FOLDER}/../a4/../{climb}/{name}" for name in outside]),
        Kind("a folder elsewhere", NOT_HERE, [f"{elsewhere}/{name}" for name in outside]),
        Kind("a link out of the root", NOT_HERE, [f"{BAD_FOLDER}/link-{name}" for name in outside]),
        Kind("weights linked out of the root", "links out of the folders", folders(local / "linked", "good", link_weights(samples))),
        Kind("a URL off the list", FORBIDDEN, spelled("http://169.254.169.254/x{}")),
        Kind("a bucket off the list", FORBIDDEN, spelled("s3://elsewhere/a{}")),
        Kind("a URL with ..", "without '..'", spelled(f"{files.url}/../etc{{}}")),
        Kind("a URL of nothing", f"there is no {CONFIG_FILE}", spelled(there + "absent{}")),
        Kind("a download cut short", f"{WEIGHTS_FILE} is cut short", folders(web / "cut", "good", cut)),
        Kind("a download with a pickle", "is a pickle", folders(web / "pickle", "good", pickle)),
        Kind("a download of another base", OTHER_SHAPES, folders(web / "foreign", "foreign")),
        Kind("a download too large", NO_ROOM, folders(web / "huge", "huge")),
        Kind("an unknown scheme", "no source 'ftp'", spelled("ftp://x/y{}")),
        Kind("no name", "printable characters", spelled("\x00{}")),
        Kind("a long name", "1 to 1024", spelled("a" * 5000 + "{}")),
    ]


def write(place: Path, sample: Path, count: int, spoil: Callable[[Path], object] | None = None) -> list[str]:
    """Folders like the sample, each with a config of its own: of equal ones the server may read the first alone. Their names."""
    folders = [place.with_name(f"{place.name}{i}") for i in range(count)]
    for folder in folders:
        shutil.copytree(sample, folder)
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**config, "revision": folder.name}))
        if spoil:
            spoil(folder)
    return [folder.name for folder in folders]


def cut(folder: Path) -> None:
    weights = folder / WEIGHTS_FILE
    os.truncate(weights, weights.stat().st_size // 2)


def break_config(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{")


def pickle(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


def header_of_lists() -> Callable[[Path], None]:
    """As long as one may be."""
    return weights_with(b'{"a":[' + b"[]," * ((MAX_HEADER_BYTES - 16) // 3) + b"[]]}")


def header_of_sizes() -> Callable[[Path], None]:
    return weights_with(b'{"a":{"dtype":"F32","shape":[' + b"9," * (MAX_HEADER_BYTES // 2 - 50) + b'9],"data_offsets":[0,4]}}')


def header_of_names() -> Callable[[Path], None]:
    return weights_with(b"{" + b",".join(b'"%06x":{}' % number for number in range(320_000)) + b"}")


def weights_with(header: bytes) -> Callable[[Path], None]:
    """One file for all folders."""
    first: list[Path] = []

    def link(folder: Path) -> None:
        weights = folder / WEIGHTS_FILE
        weights.unlink()
        if first:
            os.link(first[0], weights)
        else:
            weights.write_bytes(len(header).to_bytes(8, "little") + header)
            first.append(weights)

    return link


def link_weights(samples: Path) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / WEIGHTS_FILE).unlink()
        os.symlink(samples / "good" / WEIGHTS_FILE, folder / WEIGHTS_FILE)

    return link


def wishes(kinds: list[Kind], count: int) -> list[Wish]:
    """One of each kind after another."""
    turns = [(kinds[i % len(kinds)], i // len(kinds)) for i in range(count)]
    return [Wish(kind.reason, kind.says, kind.ids[turn % len(kind.ids)], ROUTES[turn % len(ROUTES)]) for kind, turn in turns]


def ask_all(url: str, wanted: list[Wish]) -> list[Answer]:
    """A few at a time, as fast as they are answered."""
    with httpx.Client(timeout=PATIENCE_S) as client, ThreadPoolExecutor(NUM_CLIENTS) as clients:

        def ask(wish: Wish) -> Answer:
            body = {"inputs": STREAM_PROMPT, "parameters": {"adapter_id": wish.adapter_id, "max_new_tokens": NUM_NEW}}
            asked = time.monotonic()
            response = client.post(url + wish.route, json=body)
            return Answer(wish, response.status_code, response.text, asked, time.monotonic() - asked)

        return list(clients.map(ask, wanted))


def stream(client: httpx.Client, url: str, adapter_id: str) -> Streamed:
    parameters = {"adapter_id": adapter_id, "max_new_tokens": NUM_NEW, "ignore_eos_token": True}
    times, events = [time.monotonic()], []
    with client.stream("POST", url + "/generate_stream", json={"inputs": STREAM_PROMPT, "parameters": parameters}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data:"):
                times.append(time.monotonic())
                events.append(json.loads(line.removeprefix("data:")))
    assert len(events) == NUM_NEW and events[-1].get("generated_text") is not None, events[-1:]
    first_s, *gaps_s = np.diff(times).tolist()
    return Streamed(adapter_id, tuple(event["token"]["id"] for event in events), first_s, gaps_s)


def stream_until(url: str, good_ids: list[str], is_over: Callable[[int], bool]) -> list[Streamed]:
    """Eight at once, each followed by the next. is_over is asked before each, with how many have ended."""
    answers: list[Streamed] = []

    def keep_on(number: int) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not is_over(len(answers)):
                answers.append(stream(client, url, good_ids[number % len(good_ids)]))

    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        list(clients.map(keep_on, range(NUM_STREAMS)))
    return answers


def run_rounds(url: str, good_ids: list[str], rounds: list[list[Wish]], num_alone: int, process: ProcessPoolExecutor) -> Traffic:
    """Streams alone, then beside a part of the bad requests, and so on: where the machine's pace changes, it does so for both."""
    alone, beside, answers, seconds = [], [], [], 0.0
    for wanted in rounds:
        alone += stream_until(url, good_ids, lambda num_ended: num_ended >= num_alone)
        asking = process.submit(ask_all, url, wanted)
        beside += stream_until(url, good_ids, lambda _, asking=asking: asking.done())
        answers += asking.result()
        seconds += max(one.asked + one.seconds for one in asking.result()) - min(one.asked for one in asking.result())
    return Traffic(alone, beside, answers, seconds)


def num_looked_up(answers: list[Answer]) -> int:
    """Those of ids that nobody had asked for so recently that memory might have answered."""
    last: dict[str, float] = {}
    count = 0
    for one in sorted(answers, key=lambda one: one.asked):
        count += one.asked - last.get(one.wish.adapter_id, -REMEMBERED_S) >= REMEMBERED_S
        last[one.wish.adapter_id] = one.asked + one.seconds
    return count


def pace(streams: list[Streamed]) -> dict[str, float]:
    """As readers see it. Tokens may come several in one write: the mean gap of each stream says more than the gap in the middle."""
    times = {
        "first_token": [one.first_s for one in streams],
        "gap": [gap for one in streams for gap in one.gaps_s],
        "mean_gap": [sum(one.gaps_s) / len(one.gaps_s) for one in streams],
    }
    return {f"{name}_p{share}_ms": 1000 * float(np.percentile(values, share)) for name, values in times.items() for share in (50, 99)}


def paces(traffic: Traffic) -> dict[str, dict[str, float]]:
    """Of the streams in both, and the ratio."""
    alone, beside = pace(traffic.alone), pace(traffic.beside)
    ratio = {name.removesuffix("_ms"): beside[name] / alone[name] for name in alone}
    counts = {"alone": len(traffic.alone), "beside": len(traffic.beside)}
    found = {"streams": counts, "tokens": {name: NUM_NEW * count for name, count in counts.items()}, "alone": alone, "beside": beside}
    return {title: {name: round(value, 2) for name, value in numbers.items()} for title, numbers in {**found, "ratio": ratio}.items()}


def bad_times(traffic: Traffic) -> dict[str, Any]:
    """How long all and each kind took, and what the streams saw of it."""
    by_reason: dict[str, list[Answer]] = {}
    for one in traffic.answers:
        by_reason.setdefault(one.wish.reason, []).append(one)
    seconds = [one.seconds for one in traffic.answers]
    return {
        "clients": NUM_CLIENTS,
        "answers_per_second": round(len(seconds) / traffic.seconds, 1),
        "share_within_a_second": sum(one <= 1 for one in seconds) / len(seconds),
        "share_not_from_memory": num_looked_up(traffic.answers) / len(seconds),
        "good_streams": paces(traffic),
        "all": spread(seconds),
        **{
            reason: {"ids": len({one.wish.adapter_id for one in answers}), **spread([one.seconds for one in answers])}
            for reason, answers in by_reason.items()
        },
    }
