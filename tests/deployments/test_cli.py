"""What is wrong with a command line is said in one line."""

import pytest

from loray.deployments import cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "abc"], "argument --port: abc is not a port: 1 to 65535; see loray serve --help"),
        (["serve", "--tensor-parallel-size", "x"], "argument --tensor-parallel-size: invalid int value: 'x'; see loray serve --help"),
        ([], "the following arguments are required: COMMAND; see loray --help"),
        (["adapters", "load"], "the following arguments are required: ID; see loray adapters load --help"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"loray: {words}\n"
