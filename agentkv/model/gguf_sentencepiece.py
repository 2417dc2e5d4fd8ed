"""Makes the tokenizer of a GGUF file that GGUF calls `llama`: SentencePiece's, with scores.

SentencePiece joins, again and again, the two neighbours whose union has the best score, the
leftmost of equals. Byte-pair encoding does the same with a list of pairs in order, so the list is
derived: every way to cut a token into two tokens, ordered by the token's score. (Kudo and
Richardson, SentencePiece, 2018; the same derivation as in transformers' converters.)
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

from agentkv.errors import UnsupportedModelError
from agentkv.model.gguf_metadata import GgufMetadata

SPACE = "\u2581"
"""Stands for a space inside tokens."""


def build_sentencepiece(
    metadata: GgufMetadata, vocab: Mapping[str, int], joined: Sequence[bool]
) -> Tokenizer:
    """Makes the tokenizer, as yet without its added tokens.

    Args:
        metadata: The GGUF file's keys and values.
        vocab: Token -> id.
        joined: For each id, whether the token is made by joining others.

    Raises:
        UnsupportedModelError: The file puts a space before every text, which is not understood.
    """
    if metadata.get("tokenizer.ggml.add_space_prefix", bool) is not False:
        raise UnsupportedModelError(
            "The GGUF file's tokenizer puts a space before each text, which cannot be converted; "
            "load the model's safetensors instead."
        )
    scores = metadata.require_list("tokenizer.ggml.scores", float)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", int)
    names = {number: token for token, number in vocab.items()}
    tokenizer = Tokenizer(
        models.BPE(
            dict(vocab),
            _merges(vocab, scores, joined),
            unk_token=None if unknown is None else names[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(
    vocab: Mapping[str, int], scores: Sequence[float], joined: Sequence[bool]
) -> list[tuple[str, str]]:
    """Lists every pair of tokens that makes a token, best first."""
    merges: list[tuple[str, str]] = []
    for token in sorted(vocab, key=lambda token: -scores[vocab[token]]):
        if joined[vocab[token]]:
            cuts = [(token[:place], token[place:]) for place in range(1, len(token))]
            merges += [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    return merges
