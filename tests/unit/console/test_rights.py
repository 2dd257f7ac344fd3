from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.console.rights import Members, Person, Role, is_forged, refusal

NAMES = st.sampled_from(("ann", "bob", "ops", "devs", "*"))
LISTS = st.lists(NAMES, max_size=3).map(tuple)


@given(st.sampled_from(list(Role)), st.sampled_from(list(Role)), st.booleans(), st.booleans())
def test_a_role_may_do_what_those_below_it_may_and_nothing_above_it(
    has: Role, needs: Role, may_reveal: bool, reveals: bool
) -> None:
    who = Person("ann", has, may_reveal, is_verified=True, by="test")
    allowed = not refusal(who, needs, reveals=reveals)
    assert allowed == (has >= needs and (may_reveal or not reveals))


@given(st.sampled_from(list(Role)))
def test_nobody_may_do_nothing_that_takes_a_role(needs: Role) -> None:
    assert refusal(None, needs)
    assert not refusal(None, None)


@given(
    LISTS, LISTS, LISTS, LISTS, st.sampled_from(("ann", "eve")), st.lists(st.sampled_from(("ops", "devs")), max_size=2)
)
def test_the_highest_role_that_a_name_or_a_group_has_counts(
    readers: tuple[str, ...],
    operators: tuple[str, ...],
    admins: tuple[str, ...],
    revealers: tuple[str, ...],
    name: str,
    groups: list[str],
) -> None:
    names = {name, *groups, "*"}
    expected = next(
        (
            role
            for role, members in ((Role.ADMIN, admins), (Role.OPERATOR, operators), (Role.READER, readers))
            if names & set(members)
        ),
        None,
    )
    found = Members(readers, operators, admins, revealers).person(name, groups, "oidc")
    assert (found and found.role) == expected
    if found is not None:
        assert found.may_reveal == bool(names & set(revealers))
        assert found.is_verified


@pytest.mark.parametrize(
    ("site", "origin", "ambient", "forged"),
    [
        ("same-origin", None, True, False),
        ("cross-site", "https://own", True, True),
        ("same-site", "https://own", True, True),
        ("none", None, True, True),
        (None, "https://own", True, False),
        (None, "https://evil", True, True),
        (None, "null", True, True),
        (None, None, True, True),
        (None, None, False, False),
    ],
)
def test_a_write_comes_from_a_page_of_ours(site: str | None, origin: str | None, ambient: bool, forged: bool) -> None:
    assert is_forged("POST", site=site, origin=origin, hosts={"own"}, ambient=ambient) is forged
    assert is_forged("GET", site=site, origin=origin, hosts={"own"}, ambient=ambient) is False
