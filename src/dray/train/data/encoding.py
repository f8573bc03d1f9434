"""Documents -> one row of tokens, each document with its end: plain text, its last word as label, conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from tokenizers import Encoding as Encoded
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dray.contract.findings import ConfigError
from dray.train import errors
from dray.train.data.token_cache import LABEL, LAST

_GROUP = 1 << 12  # characters
Encode = Callable[[list[str]], list[int]]

# For tokenizers that have none, such as those of base models.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool", "function")
}


class Encoding(NamedTuple):
    """A way to encode documents. All but PLAIN mark labels and document ends beside the tokens."""

    name: str
    encoder: Callable[[PreTrainedTokenizerFast, int], Encode]


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that follows each document."""
    return int(tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id)


def _plain(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    fast = tokenizer.backend_tokenizer
    mark = tokenizer.convert_ids_to_tokens(end) if _can_be_joined(fast, end) else None

    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        if mark is not None:
            # Each call has a cost for each text; this halves the time where documents are lines.
            ended = (text if text.endswith(mark) else text + mark for text in documents)
            documents = ["".join(group) for group in _groups(ended)]
        for encoding in fast.encode_batch_fast(documents):
            ids = encoding.ids
            row += ids
            if mark is None and ids[-1:] != [end]:
                row.append(end)
        return row

    return encode


def _can_be_joined(fast: Tokenizer, end: int) -> bool:
    """Whether documents with the end's own text between them are the same tokens as one by one."""
    settings = json.loads(fast.to_str())
    marks = [mark for mark in settings["added_tokens"] if mark["id"] == end]
    plain = marks and not (marks[0]["lstrip"] or marks[0]["rstrip"] or marks[0]["single_word"])
    before = settings["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    of_bytes = bool(before) and all(
        part["type"] == "Split" or (part["type"] == "ByteLevel" and not part["add_prefix_space"]) for part in parts
    )
    after = settings["post_processor"] or {}
    adds = after.get("special_tokens") or after.get("type", "ByteLevel") not in ("ByteLevel", "TemplateProcessing")
    return bool(plain and of_bytes and settings["normalizer"] is None and not adds)


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Some to be encoded together: enough that the call is cheap, and few enough that all cores have some."""
    group, size = [], 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size > _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _last_word(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        texts = [text.rstrip() for text in documents]
        for text, tokens in zip(texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            last = len(text) - len(text.split()[-1])
            row += _labelled(tokens, [range(last, len(text))])
            row.append(end | LAST)
        return row

    return encode


def ensure_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the tokenizer a chat template if it has none; it is saved with the model."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = _CHAT_TEMPLATE


def exchange(question: str, answer: str) -> str:
    """One question and its answer, as a document."""
    return json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def conversation(row: object, path: str, column: str) -> str:
    """The messages of a row, as a document; empty if no assistant answers."""
    if not isinstance(row, list) or not all(isinstance(message, dict) for message in row):
        _refuse_conversation(path, column, f"{type(row).__name__}: {str(row)[:60]}")
    messages = [_standard_message(message) for message in row]
    for message in messages:
        if message["role"] is None or message["content"] is None:
            _refuse_conversation(path, column, json.dumps(message, ensure_ascii=False)[:120])
    while messages and messages[-1]["role"] != "assistant":  # what comes after the last answer teaches nothing
        messages.pop()
    return json.dumps(messages) if messages[1:] else ""


def _standard_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with role and content, which some datasets call from and value."""
    content = message.get("content", message.get("value"))
    if content is None and message.get("tool_calls"):
        content = ""
    return message | {"role": _ROLES.get(str(message.get("role", message.get("from")))), "content": content}


def _refuse_conversation(path: str, column: str, found: str) -> NoReturn:
    raise ConfigError(
        f"column {column!r} holds no conversations",
        wanted=f'a list of {{"role": "user", "content": "..."}} in {path}; roles are {", ".join(_ROLES)}',
        found=found,
        fix="set data.column; if questions and answers are in two columns, set data.answer_column too; if the column "
        "has JSON as text, parse it in data.map",
    )


def conversation_encoder(tokenizer: PreTrainedTokenizerFast, end: int) -> Encode:
    """Conversations by the model's chat template; the assistant's tokens are labels."""

    def render(messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        with errors.refusing(
            "the chat template refuses a conversation",
            wanted=f"roles in the order that the template accepts, in {json.dumps(messages)[:200]}",
            fix="correct that conversation, or set another model.tokenizer",
        ):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def answers(messages: list[dict[str, Any]], whole: str) -> Iterator[range]:
        """Each answer's characters: from the end of the generation prompt to the end of the turn."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:  # a first message of the assistant has no labels
                continue
            before, after = render(messages[:number], prompt=True), render(messages[: number + 1]).rstrip()
            # Some templates render an earlier answer in another way than the last one; it has no labels.
            if whole.startswith(before) and whole.startswith(after):
                yield range(len(before), len(after))

    def encode(documents: list[str]) -> list[int]:
        row: list[int] = []
        chats = [json.loads(document) for document in documents]
        texts = [render(messages) for messages in chats]
        encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        for messages, text, tokens in zip(chats, texts, encodings, strict=True):
            spans = [*answers(messages, text)]
            if not spans:
                raise ConfigError(
                    "the chat template does not show where an answer begins",
                    wanted="a template that writes the answer directly after its generation prompt",
                    found=text[:200],
                    fix="set another model.tokenizer",
                )
            ids = _labelled(tokens, spans)
            if end not in tokens.ids[-2:]:  # a model that never sees the end token never stops
                ids.append(end | LABEL)
            ids[-1] |= LAST
            row += ids
        return row

    return encode


def _labelled(tokens: Encoded, spans: list[range]) -> list[int]:
    """The tokens of a text; those with a character of the spans have the mark LABEL."""
    return [
        token | (LABEL if any(begin < span.stop and after > span.start for span in spans) else 0)
        for token, (begin, after) in zip(tokens.ids, tokens.offsets, strict=True)
    ]


PLAIN, LAST_WORD = Encoding("all", _plain), Encoding("last word", _last_word)
