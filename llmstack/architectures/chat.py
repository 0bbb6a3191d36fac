"""Chat templates: the Jinja program that comes with a model writes its conversations as it was trained to read them.

It runs in Jinja's sandbox, with what transformers gives it (utils/chat_template_utils.py of version 5):

    messages, add_generation_prompt, tools, documents     None where not given, never undefined
    bos_token, eos_token, unk_token, pad_token, …         the texts of the special tokens that have a name
    raise_exception(text), strftime_now(format)           and the filter tojson, which escapes no HTML
    {% generation %} … {% endgeneration %}                around what the assistant says: it marks and changes nothing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that files have for it, the usual one first


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without their empty fields, and reasoning under the names that templates read.

    Raises ValueError where there is none, or one is no mapping with a role.
    """
    if isinstance(messages, str | Mapping) or not len(messages):
        raise ValueError(f'a conversation is a list [{{"role": "user", "content": "…"}}, …], got {messages!r}')
    out = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'a message is {{"role": "user", "content": "…"}}, got {message!r}: give it a role')
        kept = {key: value for key, value in message.items() if value is not None}
        if "content" not in kept and not len(kept) > 1:
            raise ValueError(f'a message is {{"role": "user", "content": "…"}}, got {message!r}: it says nothing')
        thought = [kept[name] for name in REASONING if name in kept]
        if thought:
            kept = {"thinking": thought[0], **kept, "reasoning_content": thought[0]}
        out.append(kept)
    return out


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation. Raises ValueError for malformed messages, a variable that the template does not read,
    or a template that refuses or fails."""
    from jinja2.meta import find_undeclared_variables

    messages = checked(messages)
    known = {"add_generation_prompt": False, "tools": None, "documents": None}
    try:
        sandbox = _sandbox()
        read = find_undeclared_variables(sandbox.parse(template))
        unread = [name for name in variables if name not in known and not name.endswith("_token") and name not in read]
        if not unread:
            return sandbox.from_string(template).render(messages=messages, **known | variables)
    except Exception as error:  # a template is foreign code, and fails in every way that code can
        raise ValueError(f"the chat template refuses these messages: {error}") from None
    raise ValueError(f"the chat template reads no {unread[0]!r}, so giving it changes nothing; leave it out")


def _sandbox():
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller):
            return caller()

    def refuse(reason: str):
        raise TemplateError(reason)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        how = dict(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return json.dumps(value, **how)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox
