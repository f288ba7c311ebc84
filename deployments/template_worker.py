"""A process that renders chat templates which strangers wrote: loops within loops may go on for ever, and texts fill the memory."""

from typing import Any

import msgspec

from loray.deployments.worker_process import Work, work_for_parent

MAX_TEXT = 8 << 20  # characters


class RenderJob(msgspec.Struct, frozen=True):
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]  # beside them: the tokenizer's special tokens


class Rendered(msgspec.Struct, frozen=True):
    text: str = ""
    missing: str = ""  # what the template wants and is not there
    refusal: str = ""


def _prepare(_: bytes) -> Work:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(job: RenderJob) -> Rendered:
        try:
            texts, _ = render_jinja_template(
                conversations=[job.messages],
                tools=job.tools or None,
                chat_template=job.template,
                add_generation_prompt=True,
                **job.variables,
            )
        except jinja2.UndefinedError as error:
            return Rendered(missing=_whole(str(error)[:500]))
        except Exception as error:  # a template is a program: it may raise anything
            return Rendered(refusal=_whole(str(error)[:500]) or type(error).__name__)
        if len(texts[0]) > MAX_TEXT:
            return Rendered(refusal=f"it makes a text of {len(texts[0])} characters")
        if _whole(texts[0]) != texts[0]:
            return Rendered(refusal="it writes half of a surrogate pair, which is no character")
        return Rendered(text=texts[0])

    return lambda job: msgspec.msgpack.encode(render(msgspec.msgpack.decode(job, type=RenderJob)))


def _whole(text: str) -> str:
    """Templates can spell half a surrogate pair, which no wire takes."""
    return text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    work_for_parent(_prepare)
