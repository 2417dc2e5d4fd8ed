"""The list of architectures says what is true: the tests and the registry stand behind it."""

from collections.abc import Iterator
from itertools import chain

import pytest
from tiny_models import FAMILIES, PROVEN_FAMILIES
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentkv.model.architectures import PROVEN, REFUSED, Refusal
from agentkv.model.support import refusal_of

NEEDS_ANOTHER_MODEL = frozenset({"gemma4_assistant"})
"""Types whose config cannot be made without that of the model they assist."""


def test_what_is_called_proven_is_proven_by_the_tests() -> None:
    """Catches a name in the list that no test runs, and a tested one that is not in it."""
    assert sorted({FAMILIES[family]().model_type for family in PROVEN_FAMILIES}) == list(PROVEN)
    assert len(PROVEN) >= 15


def test_no_name_stands_twice_and_transformers_knows_each() -> None:
    """Catches a misspelt name, and one that is proven and refused."""
    names = [*PROVEN, *chain.from_iterable(REFUSED.values())]
    assert len(names) == len(set(names))
    assert set(names) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
def test_the_loader_refuses_what_the_list_says_and_no_other() -> None:
    """Catches an entry that has become wrong with transformers, in either direction."""
    found: dict[Refusal, list[str]] = {why: [] for why in Refusal}
    for why, name in _refused():
        found[why].append(name)
    assert {why: sorted(names) for why, names in found.items()} == {
        why: sorted(names) for why, names in REFUSED.items()
    }


def _refused() -> Iterator[tuple[Refusal, str]]:
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name not in NEEDS_ANOTHER_MODEL:
            refused = refusal_of(CONFIG_MAPPING[name]())
            if refused is not None:
                yield refused.why, name
