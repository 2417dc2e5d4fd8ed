"""Answers by request id."""

import pytest

from agentkv.core.reply_table import ReplyTable
from agentkv.errors import InvalidRequest, Reason


def test_an_answer_is_found_by_tenant_method_and_id() -> None:
    """Catches an answer given to another tenant or another method."""
    table = ReplyTable(10, ttl=5)
    table.record("t", "Create", "r", "body", "answer", now=0)
    assert table.find("t", "Create", "r", "body", now=1) == "answer"
    assert table.find("u", "Create", "r", "body", now=1) is None
    assert table.find("t", "Fork", "r", "body", now=1) is None
    assert table.find("t", "Create", "s", "body", now=1) is None


def test_another_body() -> None:
    """Catches an id that answers a different question."""
    table = ReplyTable(10, ttl=5)
    table.record("t", "Create", "r", "body", "answer", now=0)
    with pytest.raises(InvalidRequest) as refusal:
        table.find("t", "Create", "r", "another", now=1)
    assert refusal.value.reason is Reason.REQUEST_ID_REUSED
    assert refusal.value.request_id == "r"


def test_no_id_is_no_entry() -> None:
    """Catches calls without an id that answer one another."""
    table = ReplyTable(10, ttl=5)
    table.record("t", "Create", None, "body", "answer", now=0)
    assert len(table) == 0
    assert table.find("t", "Create", None, "body", now=0) is None


def test_answers_expire() -> None:
    """Catches memory that is never given back, and an answer forgotten too early."""
    table = ReplyTable(10, ttl=5)
    table.record("t", "Create", "r", "body", "first", now=0)
    table.record("t", "Create", "s", "body", "second", now=3)
    assert table.find("t", "Create", "r", "body", now=4.9) == "first"
    assert table.find("t", "Create", "r", "another", now=5) is None
    assert len(table) == 1
    assert table.find("t", "Create", "s", "body", now=100) is None
    assert len(table) == 0


def test_oldest_answers_go_first() -> None:
    """Catches a table without bound."""
    table = ReplyTable(2, ttl=5)
    for number in range(3):
        table.record("t", "Create", str(number), "body", number, now=number)
    assert len(table) == 2
    assert table.find("t", "Create", "0", "body", now=3) is None
    assert table.find("t", "Create", "2", "body", now=3) == 2


def test_recorded_again_an_answer_lives_as_long_as_a_new_one() -> None:
    """Catches an answer recorded anew that hides older ones from expiry."""
    table = ReplyTable(10, ttl=5)
    table.record("t", "Create", "r", "body", "failed", now=0)
    table.record("t", "Create", "s", "body", "other", now=1)
    table.record("t", "Create", "r", "body", "answer", now=4)
    assert table.find("t", "Create", "s", "body", now=7) is None
    assert table.find("t", "Create", "r", "body", now=8) == "answer"
