"""One event as one line of words for the log, whatever strangers put into its values. Knows no events."""

import json
import re
from collections.abc import Mapping

WORD = re.compile(r"[\x21-\x7e]{1,128}")
MAX_CHARS = 200  # of a value, before it is quoted: a cut through what is quoted could leave half an escape


def log_line(kind: str, fields: Mapping[str, object]) -> str:
    return f"{kind} {' '.join(f'{name}={_value(value)}' for name, value in fields.items())}"


def _value(value: object) -> str:
    """An adapter's name may be anything; a line stays a line of words."""
    text = str(value)
    return text if WORD.fullmatch(text) and '"' not in text else json.dumps(text[:MAX_CHARS])
