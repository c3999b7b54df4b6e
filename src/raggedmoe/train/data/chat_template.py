"""A tokenizer's chat template: from messages to text, with the places of the answers in it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.storage import AnyPath

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
ASSISTANT = "assistant"
BEGIN, END = "\ufdd0", "\ufdd1"  # no characters: they mark answers while a template runs
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation as text, and the spans of characters that are learned."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of a tokenizer's folder, which may have none: only prompts that are text can be read then."""

    folder: AnyPath
    template: Any = None  # jinja2's
    marks_answers: bool = False  # by {% generation %}, as transformers reads it
    special_tokens: Mapping[str, str]

    @classmethod
    def read(cls, folder: AnyPath, today: str | None = None) -> "ChatTemplate":
        """Read the template that lies beside a tokenizer.json. ``today`` is the date that it may ask for."""
        settings = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        text = (folder / FILE).read_text(encoding="utf-8") if (folder / FILE).is_file() else None
        text = _template_of(settings.get("chat_template")) if text is None else text
        special = {name: _token_text(settings[name]) for name in SPECIAL if settings.get(name) is not None}
        if text is None:
            return cls(folder=folder, special_tokens=special)
        return cls(
            folder=folder,
            template=_compile(folder, text, datetime.now() if today is None else datetime.fromisoformat(today)),
            marks_answers="generation" in text and "endgeneration" in text,
            special_tokens=special,
        )

    def render(self, messages: Sequence[Mapping[str, Any]], *, first: int = 0, tools: Any = None) -> RenderedChat:
        """Make the text of messages. Answers are those of the assistant, from message number ``first`` on."""
        if self.template is None:
            raise ValueError(
                f"expected a chat template for messages, got neither {FILE} nor one in {CONFIG} in {self.folder}; "
                'put it there, or use {"prompt": "…", "completion": "…"} as text'
            )
        if not any(message["role"] == ASSISTANT for message in messages[first:]):
            raise ValueError("expected an assistant message to learn from, got none")
        if self.marks_answers:
            return self._render_with_marks(messages, first, tools)
        text, spans = self._text(messages, tools), []
        for number in range(first, len(messages)):
            if messages[number]["role"] != ASSISTANT:
                continue
            before = self._text(messages[:number], tools, add_generation_prompt=True)
            through = self._text(messages[: number + 1], tools)
            if not (text.startswith(before) and text.startswith(through) and len(before) <= len(through)):
                raise ValueError(
                    f"the chat template of {self.folder} writes message {number + 1} in another way when more follows, "
                    "so that its place in the text is not known; mark answers in the template with {% generation %} … "
                    "{% endgeneration %}, or give each answer a line with all that comes before it"
                )
            spans.append((len(before), len(through)))
        return RenderedChat(text=text, answers=tuple(spans))

    def _render_with_marks(self, messages: Sequence[Mapping[str, Any]], first: int, tools: Any) -> RenderedChat:
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (BEGIN, END)):
            raise ValueError(f"expected text, got {BEGIN!a} or {END!a}, which are no characters")
        pieces = self._text(messages, tools).split(BEGIN)
        text, spans = pieces[0], []
        for piece in pieces[1:]:
            answer, _, rest = piece.partition(END)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        skipped = sum(message["role"] == ASSISTANT for message in messages[:first])
        return RenderedChat(text=text, answers=tuple(spans[skipped:]))

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except (TemplateError, TypeError) as error:  # what the template itself refuses, and what it cannot add up
            raise ValueError(f"the chat template of {self.folder} refuses it: {error}") from None


def _template_of(value: Any) -> str | None:
    """Return the template of a tokenizer_config.json: one, or the default one of several."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _compile(folder: AnyPath, text: str, now: datetime) -> Any:
    """Compile a template as transformers does: sandboxed, as it comes from whoever made the checkpoint."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("reading a chat template needs jinja2: pip install 'raggedmoe[text]'") from None

    class Generation(Extension):
        """The block {% generation %}, whose text is an answer."""

        tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: expected a chat template that jinja2 reads, got: {error}") from None
