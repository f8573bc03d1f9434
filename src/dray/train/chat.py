"""Conversations: rows -> messages -> the model's chat template -> tokens, with those marked that an assistant says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from dray.train.shards import LAST, WANTED
from dray.train.stop import stop

# For tokenizers that have none, such as those of models that were never taught to chat.
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool", "function")
}


def teach(words: PreTrainedTokenizerFast) -> None:
    """Give it a template, if it has none; it is saved with the model."""
    if not words.chat_template:
        words.chat_template = _TEMPLATE


def exchange(question: str, answer: str) -> str:
    """One question and its answer, as a document."""
    return json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def conversation(row: object, path: str, column: str) -> str:
    """The messages of a row, as a document; empty where no assistant says a thing."""
    if isinstance(row, str) and row.lstrip().startswith("["):
        with suppress(ValueError):
            row = json.loads(row)
    if not isinstance(row, list) or not all(isinstance(said, dict) for said in row):
        _no(path, column, f"{type(row).__name__}: {str(row)[:60]}")
    messages = [{**said, **_said(said)} for said in row]
    unknown = [said for said in messages if said["role"] is None or said["content"] is None]
    if unknown:
        _no(path, column, json.dumps(unknown[0], ensure_ascii=False)[:120])
    while messages and messages[-1]["role"] != "assistant":  # what comes after the last answer teaches nothing
        messages.pop()
    return json.dumps(messages) if messages[1:] else ""


def _said(said: dict[str, Any]) -> dict[str, Any]:
    """Under the two names for each that are about."""
    content = said.get("content", said.get("value"))
    calls = "" if said.get("tool_calls") else None
    return {
        "role": _ROLES.get(str(said.get("role", said.get("from")))),
        "content": calls if content is None else content,
    }


def _no(path: str, column: str, found: str) -> NoReturn:
    stop(
        f"column {column!r} holds no conversations",
        wanted=f'a list of {{"role": "user", "content": "..."}} in {path}; roles are {", ".join(_ROLES)}',
        found=found,
        fix="set data.column; for a column of questions and one of answers set data.column and data.answer_column",
    )


def encoder(words: PreTrainedTokenizerFast, end: int) -> Callable[[list[str]], list[int]]:
    """Conversations as one row of marked tokens."""

    def render(messages: list[dict[str, Any]], *, more: bool) -> str:
        try:
            return str(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=more))
        except (TemplateError, TypeError, ValueError) as error:
            stop(
                "the chat template does not take a conversation",
                wanted="roles in the order that the model's template knows",
                found=f"{error}: {json.dumps(messages, ensure_ascii=False)[:200]}",
                fix="correct that conversation, or take another model.tokenizer",
            )

    def answers(messages: list[dict[str, Any]], whole: str) -> Iterator[range]:
        """Where they are: from where a model would go on, to the end of its turn."""
        for number, said in enumerate(messages):
            if said["role"] != "assistant" or not number:  # what answers nobody is read, not learnt
                continue
            before, after = render(messages[:number], more=True), render(messages[: number + 1], more=False).rstrip()
            # Some templates show an earlier turn in another way than the model once said it; it is read, not learnt.
            if whole.startswith(before) and whole.startswith(after):
                yield range(len(before), len(after))

    def encode(documents: list[str]) -> list[int]:
        chats = [json.loads(document) for document in documents]
        wholes = [render(messages, more=False) for messages in chats]
        spans = [list(answers(messages, whole)) for messages, whole in zip(chats, wholes, strict=True)]
        row: list[int] = []
        found = words.backend_tokenizer.encode_batch(wholes, add_special_tokens=False)
        for chat, mine, tokens in zip(documents, spans, found, strict=True):
            if not mine:
                stop(
                    "the chat template hides where an answer begins",
                    wanted="a template that goes on after its generation prompt",
                    found=chat[:200],
                    fix="take another model.tokenizer",
                )
            ids = [
                token | (WANTED if any(begin < span.stop and after > span.start for span in mine) else 0)
                for token, (begin, after) in zip(tokens.ids, tokens.offsets, strict=True)
            ]
            if end not in tokens.ids[-2:]:  # who never sees an end never learns to stop
                ids.append(end | WANTED)
            ids[-1] |= LAST
            row += ids
        return row

    return encode


def last_words(words: PreTrainedTokenizerFast, end: int) -> Callable[[list[str]], list[int]]:
    """Documents as one row of tokens, of which each one's last word is marked."""

    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        texts = [text.rstrip() for text in documents]
        for text, tokens in zip(texts, words.backend_tokenizer.encode_batch(texts), strict=True):
            last = len(text) - len(text.split()[-1])
            row += [
                token | (WANTED if begin < after > last else 0)
                for token, (begin, after) in zip(tokens.ids, tokens.offsets, strict=True)
            ]
            row.append(end | LAST)
        return row

    return encode
