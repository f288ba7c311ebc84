"""What an adapter's folder has in place of its template's files, beyond files that can be read: tests/deployments/test_chat_template.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from loray.deployments.adapter_template import adapter_template
from loray.deployments.errors import AdapterFailed
from tests.deployments.peft_folder import make_pipe


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("make", [make_pipe, Path.mkdir])
def test_what_is_no_file_is_the_adapters_failure_and_not_waited_for(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(AdapterFailed, match=f"{name} is not a file"):
        adapter_template(tmp_path, "a")
