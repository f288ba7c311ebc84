import random

import pytest

from loray.deployments.stop_strings import StopStrings


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    """The text given out, and the stop string found."""
    finder = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += finder.push(piece)
        if finder.matched:
            return text, finder.matched
    return text + finder.flush(), ""


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["hello ", "world"], ("hello world", "")),
        (["wor"], ["hello ", "world"], ("hello ", "wor")),
        (["lo wo"], ["hel", "lo", " ", "wo", "rld"], ("hel", "lo wo")),
        (["###"], ["a#", "b##", "c###", "d"], ("a#b##c", "###")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["END", "\n\n"], ["x\n", "y", "\n", "\nEND"], ("x\ny", "\n\n")),
        (["stop"], ["this is st"], ("this is st", "")),
        (["ab", "abc"], ["xabc"], ("x", "ab")),
        (["bcd", "c"], ["abcd"], ("ab", "c")),
        (["d", "bcd"], ["abcd"], ("a", "bcd")),
        (["語"], ["日本", "語!"], ("日本", "語")),
    ],
)
def test_text_stops_at_the_first_stop_string(stops: list[str], pieces: list[str], expected: tuple[str, str]) -> None:
    assert feed(stops, pieces) == expected


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["abab!"])
    assert [finder.push(piece) for piece in ["x", "a", "b", "a", "b", "a", "b", "c"]] == ["x", "", "", "", "", "ab", "", "ababc"]


def test_the_way_the_text_is_cut_does_not_matter() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert feed(stops, pieces) == feed(stops, list(text)) == feed(stops, [text])
