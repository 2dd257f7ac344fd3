"""The rules that people change, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from dead_rows import add, row, store_at
from sqlalchemy import Engine, text

from dlqbatch.errors import DatabaseUnreadable
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.lifecycle.rules import DEFAULT_RULES, RuleRefused, in_order
from dlqbatch.store.engine import writing
from dlqbatch.store.filters import NoSuchMessage, NotUnderstood
from dlqbatch.store.states import On, Strategy


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def rules(engine: Engine) -> Rules:
    return Rules(engine)


def run(engine: Engine, statement: str, **values: object) -> None:
    with writing(engine) as connection:
        connection.execute(text(statement), values)


def test_a_new_installation_has_the_default_rules_in_their_order(rules: Rules) -> None:
    assert rules.all() == tuple(in_order(DEFAULT_RULES))
    assert rules.load()[1] == ()


def test_a_rule_that_somebody_adds_wins(rules: Rules) -> None:
    assert rules.test("TimeoutError", None).strategy is Strategy.IMMEDIATE
    added = rules.set("slow-tenant", on=On.TYPE, pattern="timeout", strategy=Strategy.MANUAL)
    assert added.is_new
    assert rules.all()[0] == added.rule
    found = rules.test("TimeoutError", None)
    assert (found.strategy, found.rule) == (Strategy.MANUAL, "slow-tenant")
    assert [match.rule.name for match in found.matches] == ["slow-tenant", "time-out-type"]
    second = rules.set("slower-tenant", pattern="timeout", strategy=Strategy.SCHEDULED).rule
    assert (rules.all()[0], second.on) == (second, On.ANY)


def test_a_position_puts_a_rule_between_two_others(rules: Rules) -> None:
    first, second, *_ = rules.all()
    between = rules.set("between", pattern="x", strategy=Strategy.MANUAL, position=first.position + 1).rule
    assert rules.all()[:3] == (first, between, second)


def test_the_first_of_all_rules_has_a_place_too(engine: Engine, rules: Rules) -> None:
    run(engine, "DELETE FROM dlq_rules")
    assert rules.set("only", pattern="x", strategy=Strategy.MANUAL).rule.position == 0
    rules.set("only", position=-(2**31))
    with pytest.raises(NotUnderstood, match="no room before the first rule"):
        rules.set("another", pattern="x", strategy=Strategy.MANUAL)


def test_what_is_not_given_of_a_rule_stays(rules: Rules) -> None:
    before = next(rule for rule in rules.all() if rule.name == "time-out-type")
    changed = rules.set("time-out-type", strategy=Strategy.SCHEDULED)
    assert not changed.is_new
    after = next(rule for rule in rules.all() if rule.name == "time-out-type")
    assert after == changed.rule
    assert (after.position, after.on, after.pattern) == (before.position, before.on, before.pattern)
    assert after.strategy is Strategy.SCHEDULED
    assert len(rules.all()) == len(DEFAULT_RULES)


@pytest.mark.parametrize("pattern", ["", "(", "(a+)+", ".*.*.*x", "a*", "\0", "\udcff", "x" * 1001, "(?P<n>a)"])
def test_a_pattern_that_cannot_be_a_rule_is_refused_and_nothing_is_written(rules: Rules, pattern: str) -> None:
    before = rules.all()
    with pytest.raises(RuleRefused):
        rules.set("mine", pattern=pattern, strategy=Strategy.MANUAL)
    with pytest.raises(RuleRefused):
        rules.set("time-out-type", pattern=pattern)
    assert rules.all() == before


@pytest.mark.parametrize("name", ["", " ", "unknown", "a\nb", "\0", "\udcff", "n" * 256, "\x1b[31m"])
def test_a_name_that_nobody_could_write_again_is_refused(rules: Rules, name: str) -> None:
    with pytest.raises(NotUnderstood):
        rules.set(name, pattern="x", strategy=Strategy.MANUAL)
    assert not rules.remove(name)


def test_a_new_rule_says_what_it_finds_and_what_becomes_of_it(rules: Rules) -> None:
    with pytest.raises(NotUnderstood, match="--pattern"):
        rules.set("mine", strategy=Strategy.MANUAL)
    with pytest.raises(NotUnderstood, match="--strategy"):
        rules.set("mine", pattern="x")
    with pytest.raises(NotUnderstood, match="32 bits"):
        rules.set("mine", pattern="x", strategy=Strategy.MANUAL, position=2**31)
    assert rules.all() == tuple(in_order(DEFAULT_RULES))


def test_hostile_words_are_words(rules: Rules) -> None:
    name = "'; DROP TABLE dlq_rules; --"
    rules.set(name, pattern="' OR '1'='1|%s|:name|ß", strategy=Strategy.MANUAL)
    assert rules.test(None, "a :NAME b").rule == name
    assert rules.remove(name)
    assert len(rules.all()) == len(DEFAULT_RULES)


def test_a_rule_that_is_removed_no_longer_decides(rules: Rules) -> None:
    assert rules.remove("time-out-type", dry_run=True)
    assert rules.test("TimeoutError", None).rule == "time-out-type"
    assert rules.remove("time-out-type")
    found = rules.test("TimeoutError", None)
    assert (found.strategy, found.rule, found.matches) == (Strategy.MANUAL, "unknown", ())
    assert not rules.remove("time-out-type")
    assert not rules.remove("time-out-type", dry_run=True)
    assert "conflict-type" in rules.like("conflict")
    assert rules.like("zzzzzzzz") == ()


def test_a_dry_run_says_the_same_and_writes_nothing(rules: Rules) -> None:
    before = rules.all()
    for name, pattern in (("mine", "x"), ("time-out-type", "y")):
        planned = rules.set(name, pattern=pattern, strategy=Strategy.MANUAL, dry_run=True)
        assert rules.all() == before
        done = rules.set(name, pattern=pattern, strategy=Strategy.MANUAL)
        assert (planned.rule, planned.is_new, planned.dry_run) == (done.rule, done.is_new, True)
        before = rules.all()


def test_a_row_that_cannot_be_a_rule_is_left_out_and_told(engine: Engine, rules: Rules) -> None:
    run(engine, "UPDATE dlq_rules SET pattern = '(a+)+' WHERE name = 'time-out-type'")
    run(engine, "UPDATE dlq_rules SET pattern = '(' WHERE name = 'conflict-type'")
    found, warnings = rules.load()
    assert len(found) == len(DEFAULT_RULES) - 2
    assert [warning.split("'")[1] for warning in warnings] == ["conflict-type", "time-out-type"]
    assert all("`dlqbatch rules set" in warning for warning in warnings)
    assert rules.all() == found
    assert rules.test("TimeoutError", None).warnings == warnings
    rules.set("time-out-type", pattern="timeout")
    assert rules.test("TimeoutError", None).rule == "time-out-type"


def test_what_only_sqlite_stores_is_left_out_too(sqlite_url: str) -> None:
    engine = store_at(sqlite_url)
    rules = Rules(engine)
    run(engine, "UPDATE dlq_rules SET pattern = x'ff' WHERE name = 'time-out-type'")
    run(engine, "UPDATE dlq_rules SET position = 'first' WHERE name = 'conflict-type'")
    assert len(rules.load()[1]) == 2
    with pytest.raises(NotUnderstood, match="--pattern"):
        rules.set("time-out-type", strategy=Strategy.MANUAL)
    rules.set("time-out-type", pattern="timeout")
    rules.set("conflict-type", position=3)
    assert rules.load()[1] == ()


def test_the_error_of_a_message_is_tested(engine: Engine, rules: Rules) -> None:
    timed_out, unknown = add(engine, row(error_type="TimeoutError", error_message="after 3 s"), row())
    found = rules.test_message(timed_out)
    assert (found.error_type, found.message, found.rule) == ("TimeoutError", "after 3 s", "time-out-type")
    assert rules.test_message(unknown).strategy is Strategy.MANUAL
    for number in (0, -1, 10**6, 2**70):
        with pytest.raises(NoSuchMessage):
            rules.test_message(number)


def test_many_who_set_one_rule_leave_one(rules: Rules) -> None:
    barrier = Barrier(4)

    def hurry(number: int) -> None:
        barrier.wait()
        for _ in range(5):
            rules.set("mine", pattern=f"x{number}", strategy=Strategy.MANUAL)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hurry, range(4)))
    assert [rule.name for rule in rules.all()].count("mine") == 1


def test_without_the_table_it_says_what_makes_it(engine: Engine, rules: Rules) -> None:
    run(engine, "DROP TABLE dlq_rules")
    with pytest.raises(DatabaseUnreadable, match="dlqbatch db upgrade"):
        rules.all()
