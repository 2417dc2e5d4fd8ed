"""Text to token ids and back, with the caller's text kept apart from the model's control tokens.

It owns the rule that text never becomes a control token unless the caller says so. It knows no
contexts and no stop texts; incremental text is the detokenizer's.

A *marker* is the text of an added token: `<|im_end|>`, `<think>`. Markers flagged special are
*control tokens*. Added tokens that are mere text (runs of spaces, single characters) are not
markers: models were trained to meet them in ordinary text.
"""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentkv.constraint import Tool
from agentkv.engine.chat_template import ChatTemplate, Encoders
from agentkv.engine.conversation import ChatExtension, ChatMessage, Conversation, Ending
from agentkv.engine.text_checks import check_text
from agentkv.errors import InvalidRequest, Reason


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
        texts = {number: token for number, token in added.items() if not _is_marker(token)}
        self._plain = _without_markers(self._marked, texts.values())
        # Tokens outside the model's vocabulary are numbered anew by the encoder they are added to.
        renumbered = {self._plain.token_to_id(token.content): n for n, token in texts.items()}
        self._real_ids = {plain: real for plain, real in renumbered.items() if plain != real}
        # An unknown word is text, even where its stand-in is flagged special.
        self._forbidden = self.control_ids - {hf_tokenizer.unk_token_id}
        self._prefix = self._find_prefix()
        self._chat = ChatTemplate(
            hf_tokenizer,
            Encoders(
                plain=self.encode,
                marked=lambda text: _encode(self._marked, text),
                decode=self.decode,
                markers=tuple(token for token in added.values() if _is_marker(token)),
                control_ids=self.control_ids,
            ),
        )

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
        check_text(text, "text")
        if allow_special:
            return _encode(self._marked, text)
        ids = _encode(self._plain, text)
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
        self,
        messages: Sequence[ChatMessage],
        *,
        ending: Ending = Ending.PROMPTED,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Encodes a conversation by the model's chat template.

        The template's own markers become tokens, those in a message's content stay text. One
        exception: in the assistant's own turns, markers that are not control tokens (`<think>`)
        are read as tokens, because the model wrote them and templates look for them.

        Args:
            messages: The turns, oldest first; at least one.
            ending: What follows the last message; the opening of an assistant's turn as a rule.
            tools: What the template shows the model as callable.

        Raises:
            InvalidRequest: The model has no chat template, a role is unknown, a content is not
                valid text, or the template refuses the conversation or takes too long.
        """
        return self._chat.encode(Conversation(tuple(messages), ending, tuple(tools)))

    def extend_chat(
        self, before: Conversation, turn_ids: Sequence[int], added: Conversation
    ) -> ChatExtension:
        """Finds the tokens that new messages append to a context made of a conversation.

        They are exactly those that the template writes for the whole conversation after what is
        there already; or a reason says why there are none.

        Args:
            before: What the context was made of.
            turn_ids: What follows it there: the assistant's turn, as the model generated it.
            added: The new messages.

        Raises:
            InvalidRequest: As for `encode_chat`.
        """
        return self._chat.extend(before, turn_ids, added)

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


def _encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encodes text as it stands.

    As a batch of one: for a single text the library keeps Python's lock, and a long text would
    hold up every other thread for as long as it takes.
    """
    (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
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
