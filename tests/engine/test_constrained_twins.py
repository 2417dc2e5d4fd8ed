"""Constrained generations over random schemas, in the size that a test run can afford."""

import pytest
from constrained_twins import ConstrainedTwins


@pytest.mark.slow
def test_random_schemas_parse_and_branches_equal_their_unforked_twins() -> None:
    """Catches text that does not fit, and state that a fork loses, shares or misplaces.

    `make constraints` runs ten thousand.
    """
    counts = ConstrainedTwins().run(range(300))
    assert counts.num_branches > 300
