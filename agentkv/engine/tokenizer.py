"""Text to token ids and back, with the caller's text kept apart from the model's control tokens.

It owns the rule that text never becomes a control token unless the caller says so. It knows no
contexts and no stop texts; incremental text is the detokenizer's.

A *marker* is the text of an added token: `<|im_end|>`, `<think>`. Markers flagged special are
*control tokens*. Added tokens that are mere text (runs of spaces, single characters) are not
markers: models were trained to meet them in ordinary text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tokenizers
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentkv.errors import InvalidRequest, Reason

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A closed list, because a role is written into the prompt unescaped."""
_SENTINELS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Code points that Unicode reserves for use inside a program; text does not contain them."""


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """Encodes and decodes text for one model; safe to use from several threads at once.

    Nothing is changed after construction: the library's switch for special tokens is state of
    the shared object, so two encoders are kept instead of flipping it.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        """Takes over a Hugging Face fast tokenizer; nobody else may call it afterwards.

        Args:
            hf_tokenizer: The model's own tokenizer, with its chat template if it has one.
        """
        self._templates = hf_tokenizer
        self._marked: tokenizers.Tokenizer = hf_tokenizer.backend_tokenizer
        self._marked.no_truncation()
        self._marked.no_padding()
        added = self._marked.get_added_tokens_decoder()
        self.control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that stand for no text."""
        self._markers = [token for token in added.values() if _is_marker(token)]
        texts = {number: token for number, token in added.items() if not _is_marker(token)}
        self._plain = _without_markers(self._marked, texts.values())
        # Tokens outside the model's vocabulary are numbered anew by the encoder they are added to.
        renumbered = {self._plain.token_to_id(token.content): n for n, token in texts.items()}
        self._real_ids = {plain: real for plain, real in renumbered.items() if plain != real}
        # An unknown word is text, even where its stand-in is flagged special.
        self._forbidden = self.control_ids - {hf_tokenizer.unk_token_id}
        self._prefix = self._find_prefix()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The encoder that knows all added tokens; for reading only."""
        return self._marked

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text or a meaning; the model's logits may be wider."""
        return self._marked.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template."""
        template: object = self._templates.chat_template
        return template if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._templates.chat_template is not None

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encodes text as it stands, adding nothing; what an extend appends.

        Args:
            text: Unicode text without NUL.
            allow_special: Read markers in the text as their tokens instead of as text.

        Raises:
            InvalidRequest: The text is not valid Unicode, holds NUL, or cannot be told from a
                control token by this tokenizer.
        """
        _check_text(text, "text")
        if allow_special:
            return self._marked.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._real_ids:
            ids = [self._real_ids.get(token_id, token_id) for token_id in ids]
        if not self._forbidden.isdisjoint(ids):
            raise InvalidRequest(
                "The text spells a control token that this tokenizer cannot write as plain text; "
                "change it, or allow special tokens.",
                violations={"text": "spells a control token"},
            )
        return ids

    def encode_prompt(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encodes the first text of a context: with the tokens the model expects at its start.

        Args:
            text: Unicode text without NUL.
            allow_special: Read markers in the text as their tokens. A beginning-of-sequence
                marker that the text brings itself is then not added a second time.

        Raises:
            InvalidRequest: As for `encode`.
        """
        ids = self.encode(text, allow_special=allow_special)
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Encodes a conversation by the model's chat template.

        The template's own markers become tokens, those in a message's content stay text. One
        exception: in the assistant's own turns, markers that are not control tokens (`<think>`)
        are read as tokens, because the model wrote them and templates look for them.

        Args:
            messages: The turns, oldest first; at least one.
            add_generation_prompt: End with the opening of an assistant's turn.

        Raises:
            InvalidRequest: The model has no chat template, a role is unknown, a content is not
                valid text, or the template refuses the conversation.
        """
        if not messages:
            raise InvalidRequest("A conversation needs at least one message.")
        for number, message in enumerate(messages):
            _check_text(message.content, f"messages[{number}].content")
            if message.role not in ROLES:
                raise InvalidRequest(
                    f"The role {message.role!r} is unknown; use one of {', '.join(ROLES)}.",
                    violations={f"messages[{number}].role": "unknown role"},
                )
        sentinel = _unused_sentinel(messages)
        hidden = [
            {"role": message.role, "content": self._hide_markers(message, sentinel)}
            for message in messages
        ]
        rendered = self._render(hidden, add_generation_prompt)
        if sentinel not in rendered:
            return self._marked.encode(rendered, add_special_tokens=False).ids
        return self._encode_around_markers(rendered, sentinel)

    def decode(self, ids: Sequence[int], *, skip_control: bool = True) -> str:
        """Decodes ids at once; an incomplete character at the end gives U+FFFD.

        Args:
            ids: Token ids; ids that the tokenizer does not know stand for no text.
            skip_control: Leave out control tokens instead of writing their names.

        Raises:
            InvalidRequest: An id is negative or does not fit in 32 bits.
        """
        try:
            return self._marked.decode(list(ids), skip_special_tokens=skip_control)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(
                "Token ids must be integers from 0 on.", reason=Reason.TOKEN_OUT_OF_RANGE
            ) from error

    def _find_prefix(self) -> list[int]:
        """Finds the ids that the tokenizer puts before a text: none, or one BOS as a rule."""
        probe = "a"
        bare = self._marked.encode(probe, add_special_tokens=False).ids
        whole = self._marked.encode(probe, add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return []

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; send text instead of messages.",
                reason=Reason.UNSUPPORTED_OPTION,
            )
        try:
            rendered: object = self._templates.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}"
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _hide_markers(self, message: ChatMessage, sentinel: str) -> str:
        """Writes a number between two sentinels for each marker that has to stay text."""
        only_control = message.role == "assistant"
        hidden = [token for token in self._markers if token.special or not only_control]
        if not hidden:
            return message.content
        numbers = {token.content: number for number, token in enumerate(self._markers)}
        return _longest_first(hidden).sub(
            lambda match: f"{sentinel}{numbers[match[0]]}{sentinel}", message.content
        )

    def _encode_around_markers(self, rendered: str, sentinel: str) -> list[int]:
        """Encodes a rendered conversation in which some markers are hidden."""
        by_text = {token.content: token for token in self._markers}
        hidden = re.compile(f"{sentinel}(\\d+){sentinel}")
        ids: list[int] = []
        end = 0

        def add_text(text: str) -> None:
            restored = hidden.sub(lambda match: self._markers[int(match[1])].content, text)
            if restored:
                ids.extend(self.encode(restored))

        for match in _longest_first(self._markers).finditer(rendered):
            token = by_text[match[0]]
            text = rendered[end : match.start()]
            # As the library does: such a token swallows the white space beside it.
            add_text(text.rstrip() if token.lstrip else text)
            token_id = self._marked.token_to_id(token.content)
            assert token_id is not None
            ids.append(token_id)
            end = match.end()
            while token.rstrip and rendered[end : end + 1].isspace():
                end += 1
        add_text(rendered[end:])
        return ids


def _is_marker(token: AddedToken) -> bool:
    return token.special or (len(token.content) > 1 and not token.content.isspace())


def _without_markers(
    marked: tokenizers.Tokenizer, texts: Iterable[AddedToken]
) -> tokenizers.Tokenizer:
    """Makes an encoder that reads markers as text; it shares the vocabulary of the other one.

    Args:
        marked: The encoder that knows all added tokens.
        texts: Those of them that are text, and so stay.
    """
    plain = tokenizers.Tokenizer(marked.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(marked, part)) is not None:
            setattr(plain, part, value)
    plain.add_tokens(list(texts))
    return plain


def _longest_first(tokens: Sequence[AddedToken]) -> re.Pattern[str]:
    texts = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in texts))


def _unused_sentinel(messages: Sequence[ChatMessage]) -> str:
    for sentinel in _SENTINELS:
        if not any(sentinel in message.content for message in messages):
            return sentinel
    raise InvalidRequest("The messages hold every code point that is reserved for programs.")


def _check_text(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "The text is not valid Unicode: it holds half a surrogate pair.",
            violations={field: f"lone surrogate at {error.start}"},
        ) from error
    if "\0" in text:
        raise InvalidRequest(
            "The text holds a NUL character.", violations={field: f"NUL at {text.index(chr(0))}"}
        )
