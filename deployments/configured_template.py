"""The chat template of the config. Renders no requests."""

from pathlib import Path

import jinja2


def configured_template(value: str) -> str:
    """The text itself, or of the file that it names."""
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template: neither a template nor a readable file: {error}") from None


def check_configured(value: str) -> None:
    """Raises ValueError for what is no template."""
    from transformers.utils.chat_template_utils import render_jinja_template  # only who configures one waits for transformers

    template = configured_template(value)
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"model.chat_template: no template: {error.message} (line {error.lineno})") from None
    except Exception:  # it refuses this conversation, and may take others
        return
