"""What other numbers of retries had made of what failed, against a walk through the retries one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.drain.simulate import FATES, Died, fate, retries_more, simulate

DIED = st.builds(
    Died,
    st.sampled_from(["orders.created", "orders.paid", "mail", None]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
    st.integers(1, 50),
)


def walked(died: Died, max_retries: int) -> tuple[str, int]:
    """Its fate and its delayed retries, retry by retry: what is on record, then nothing that is known."""
    outcomes = ["failed"] * (died.retries + died.failed_after) + ["succeeded"] * died.succeeded_after
    for number in range(max_retries):
        if number == len(outcomes):
            return "unknown", max_retries
        if outcomes[number] == "succeeded":
            return "handled", number + 1
    if max_retries == died.retries:
        return "as_it_was", max_retries
    return ("dead_sooner" if max_retries < died.retries else "dead_all_the_same"), max_retries


@given(DIED, st.integers(0, 12))
def test_the_fate_is_that_of_a_walk_through_its_retries(died: Died, max_retries: int) -> None:
    expected, retries = walked(died, max_retries)
    assert fate(died, max_retries) == expected
    assert retries_more(died, max_retries) == retries - died.retries


@given(st.lists(DIED, max_size=20), st.integers(0, 9))
def test_every_message_of_an_event_that_is_asked_about_counts_once(history: list[Died], max_retries: int) -> None:
    def number_of(event: str) -> tuple[str, int] | None:
        return ("orders.*", max_retries) if event.startswith("orders.") else None

    found = simulate(history, number_of)
    meant = [died for died in history if died.event is not None and died.event.startswith("orders.")]
    assert [each.messages for each in found] == ([sum(died.messages for died in meant)] if meant else [])
    for each in found:
        assert sum(each.fates.values()) == each.messages
        assert each.fates.keys() == set(FATES)
        walks = [(walked(died, max_retries), died) for died in meant]
        assert each.retries == sum((retries - died.retries) * died.messages for (_, retries), died in walks)
        for one in FATES:
            assert each.fates[one] == sum(died.messages for (name, _), died in walks if name == one)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(0, 12))
def test_the_time_until_the_last_retry_is_that_of_its_delays(delays: list[int], max_retries: int) -> None:
    waited = sum(delays[min(retry, len(delays) - 1)] for retry in range(max_retries))
    died = [Died("mail", 1, 0, False, 1), Died("orders.paid", 1, 0, False, 1)]
    [one] = simulate(died[:1], lambda _: ("#", max_retries), lambda _: delays)
    assert one.waits == waited / 1000
    [both] = simulate(died, lambda _: ("#", max_retries), lambda event: delays if event == "mail" else [1])
    assert both.waits == (waited / 1000 if waited == max_retries else None)
