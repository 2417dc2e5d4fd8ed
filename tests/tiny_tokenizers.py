"""Tiny byte-level BPE tokenizers: every byte is a token, a few merges, markers of three kinds."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Turns between markers, as SmolLM2 and Qwen write them."""
CONTROL = ("<s>", "<|im_start|>", "<|im_end|>")
"""Added tokens flagged special; ids 0, 1, 2."""
ORDINARY = ("<think>", "</think>")
"""Added tokens that are markers without the flag."""
SPACES = "        "
"""An added token that is mere text."""
MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "s"),
    ("Ġs", "t"),
    ("o", "k"),
    ("!", "?"),
    ("!?", "!"),
    ("Ġ", "ð"),
)


def build_tiny_tokenizer(
    *,
    chat_template: str | None = CHATML,
    adds_bos: bool = False,
    merges: Sequence[tuple[str, str]] = MERGES,
) -> PreTrainedTokenizerFast:
    """Builds the tokenizer; the same ids every time.

    The last merge is a space with the first byte of an emoji, which every real one has too.

    Args:
        chat_template: Jinja source; None for a model without one.
        adds_bos: Whether the tokenizer puts `<s>` before a text.
        merges: In order of priority, over the characters that stand for bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*CONTROL, *alphabet, *(left + right for left, right in merges)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    backend.add_tokens([AddedToken(text, special=False) for text in ORDINARY])
    backend.add_tokens([AddedToken(SPACES, special=False, normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    factory: Any = PreTrainedTokenizerFast  # the library does not type its constructor
    made: PreTrainedTokenizerFast = factory(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    return made


def byte_ids(backend: Tokenizer, text: bytes) -> list[int]:
    """Encodes bytes as one token each, which can also be half a character."""
    alphabet = _byte_alphabet()
    ids = [backend.token_to_id(alphabet[byte]) for byte in text]
    return [token_id for token_id in ids if token_id is not None]


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself if printable in Latin-1, else from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
