import random

import pytest

from loray.deployments.stop_strings import Shelter, StopStrings


def feed(stops: list[str], pieces: list[str], shelter: Shelter | None = None) -> tuple[str, str]:
    """The text given out, and the stop string found."""
    finder = StopStrings(stops, shelter)
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


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("is_first", "stop", "text", "expected"),
    [
        (False, "x", "a(x]b", ("a(x]b", "")),
        (False, "x", "a(x]bxc", ("a(x]b", "x")),
        (False, "x", "a(x](x]x", ("a(x](x]", "x")),
        (False, "a(x", "a(x]", ("a(x]", "")),
        (False, "a(", "a(x]", ("", "a(")),
        (False, "]", "a(x]b]", ("a(x]b", "]")),
        (True, "x", "a(x]b", ("a(", "x")),
        (True, "x", " (x] (x]x", (" (x] (x]", "x")),
        (True, "x", "(y]b(x]", ("(y]b(", "x")),
    ],
)
def test_stop_strings_do_not_count_where_they_are_sheltered(
    is_first: bool, stop: str, text: str, expected: tuple[str, str], size: int
) -> None:
    begin, end = "<(>", "<]>"
    marked = [part.replace("(", begin).replace("]", end) for part in (stop, text, expected[0], expected[1])]
    pieces = [marked[1][start : start + size] for start in range(0, len(marked[1]), size)]
    assert feed([marked[0]], pieces, Shelter(begin, end, is_first)) == (marked[2], marked[3])


def test_a_stop_string_that_ended_before_it_counted_is_text() -> None:
    finder = StopStrings(["ab", "xaby"])
    assert finder.push("ab xab", is_counting=False) + finder.push("z") == "ab xabz" and not finder.matched
    assert finder.push("a", is_counting=False) + finder.push("b") == "" and finder.matched == "ab"
