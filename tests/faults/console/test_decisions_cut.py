"""A console that dies in the middle of a decision: nothing is half done, and the same form sent again does no more.

Every form of the route table is sent by a console whose connection to the database is cut at each of its commits,
before the server has heard it and after; that is all that the database sees of a process that dies. What stands in the
database then is what stood there before, or the whole decision.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from console_client import as_role, made, opened, text_of
from cutting_link import CuttingLink
from dead_rows import add, row
from program import Client, client
from replay_rows import dead

from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.testclient import TestClient

    from dlqbatch.console.app import Console

REASON = {"reason": "a test"}
DECIDES_NOTHING = {
    *("/login", "/logout", "/messages"),
    *("/messages/{id}/reveal", "/messages/{id}/file", "/messages/{id}/edit/open"),
}
"""Forms that show something, or open and close the door."""
TAKES_FROM_THE_BROKER = {"/head"}
"""It takes a message out of a queue as ingest does, whose faults tests/faults/ingest tries."""
CUT_ELSEWHERE = {"/head"}
"""It takes a message from the broker, which stays there until its row is stored: cut in `test_ingest_head.py`."""
_groups = itertools.count(1)
Effects = dict[tuple[object, ...], int]
"""How many rows of each kind there are, or how many more."""


class Form(NamedTuple):
    place: str
    fields: Mapping[str, str] = MappingProxyType({})


class Scene:
    """A database behind a link that can be cut, a console on each side of it, and what a decision needs."""

    def __init__(
        self,
        console: Console,
        dying: Console,
        steady: TestClient,
        cut: TestClient,
        link: CuttingLink,
        team: Client,
    ) -> None:
        self.console, self.dying, self.steady, self.cut, self.link, self.team = console, dying, steady, cut, link, team
        self.address = console.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.queue = ""

    def messages(self, number: int = 3, status: Status = Status.MANUAL, **columns: Any) -> list[int]:
        """In a queue and a group of their own."""
        place = next(_groups)
        self.queue = f"work.{place}"
        given = {"origin_queue": self.queue, "error_type": "KeyError", "fingerprint": f"{place:016x}", "status": status}
        return add(self.console.engine, *(row(**given | columns) for _ in range(number)))

    def group(self) -> str:
        self.messages()
        return f"{int(self.queue.partition('.')[2]):016x}"

    def done(self, form: Form) -> str:
        """A decision before the one that is cut; says where it leads."""
        answer = self.steady.post(form.place, data=dict(form.fields))
        assert answer.status_code == 303, text_of(answer)
        return str(answer.headers["location"])

    def replayable(self, size: int) -> None:
        place = next(_groups)
        self.queue = f"work.{place}"
        self.team.channel.queue_declare(self.queue, durable=True)
        rows = (dead(place * 100 + each, self.queue, status=Status.MANUAL) for each in range(size))
        add(self.console.engine, *rows)

    def plan(self, state: str = "planned", size: int = 5) -> str:
        self.replayable(size)
        made_plan = self.done(Form("/plans", {"query": f"origin={self.queue}", **REASON}))
        if state != "planned":
            self.done(Form(f"{made_plan}/release", {"rate": "10/s"}))
        if state == "stopped":
            self.done(Form(f"{made_plan}/pause", REASON))
        return made_plan

    def by_filter(self, place: str, number: int, **more: str) -> Form:
        return Form(place, {"query": f"origin={self.queue}", "number": str(number), **REASON, **more})


def discard(scene: Scene) -> Form:
    scene.messages()
    return scene.by_filter("/discard", 3)


def restore(scene: Scene) -> Form:
    scene.messages()
    scene.done(scene.by_filter("/discard", 3))
    return scene.by_filter("/restore", 3)


def edit_many(scene: Scene) -> Form:
    scene.messages()
    return scene.by_filter("/edit", 3, step="save", headers="tenant=blue")


def edit(scene: Scene) -> Form:
    (row_id,) = scene.messages(1)
    return Form(f"/messages/{row_id}/edit", {"body": '{"a": 1}', "step": "save", **REASON})


def undo(scene: Scene) -> Form:
    scene.messages()
    scene.done(scene.by_filter("/discard", 3))
    with psycopg.connect(scene.address) as store:
        ((newest,),) = store.execute("SELECT max(id) FROM dlq_actions").fetchall()
    return Form(f"/actions/A-{newest}/undo")


def unhold(scene: Scene) -> Form:
    place = f"/groups/{scene.group()}"
    scene.done(Form(f"{place}/hold", REASON))
    return Form(f"{place}/unhold", REASON)


def approve(scene: Scene) -> Form:
    with psycopg.connect(scene.address) as store:
        place = scene.plan(size=9)
        store.execute("UPDATE dlq_plans SET actor = 'somebody else' WHERE hash = %s", (place.rpartition("/")[2],))
    return Form(f"{place}/approve", REASON)


def plan_of_five(scene: Scene) -> Form:
    scene.replayable(5)
    return Form("/plans", {"query": f"origin={scene.queue}", "form": scene.queue, **REASON})


def removed(place: str, fields: dict[str, str]) -> Callable[[Scene], Form]:
    def prepare(scene: Scene) -> Form:
        name = f"name-{next(_groups)}"
        scene.done(Form(place, {"name": name, **fields}))
        return Form(f"{place}/remove", {"name": name})

    return prepare


RULE = {"pattern": "429", "strategy": "scheduled", "on": "any"}
FORMS: dict[str, Callable[[Scene], Form]] = {
    "/discard": discard,
    "/restore": restore,
    "/edit": edit_many,
    "/messages/{id}/edit": edit,
    "/actions/{name}/undo": undo,
    "/groups/{fingerprint}/hold": lambda scene: Form(f"/groups/{scene.group()}/hold", REASON),
    "/groups/{fingerprint}/unhold": unhold,
    "/groups/{fingerprint}/acknowledge": lambda scene: Form(f"/groups/{scene.group()}/acknowledge", REASON),
    "/groups/{fingerprint}/note": lambda scene: Form(f"/groups/{scene.group()}/note", {"note": "see INC-1"}),
    "/plans": plan_of_five,
    "/plans/{hash}/release": lambda scene: Form(f"{scene.plan()}/release", {"rate": "10/s"}),
    "/plans/{hash}/approve": approve,
    "/plans/{hash}/abort": lambda scene: Form(f"{scene.plan()}/abort"),
    "/plans/{hash}/pause": lambda scene: Form(f"{scene.plan('applying')}/pause", REASON),
    "/plans/{hash}/resume": lambda scene: Form(f"{scene.plan('stopped')}/resume"),
    "/plans/{hash}/rate": lambda scene: Form(f"{scene.plan('applying')}/rate", {"rate": "20/s"}),
    "/events": lambda _: Form("/events", {"name": f"name-{next(_groups)}", "max_retries": "5"}),
    "/events/remove": removed("/events", {"max_retries": "5"}),
    "/rules": lambda _: Form("/rules", {"name": f"name-{next(_groups)}", **RULE}),
    "/rules/remove": removed("/rules", RULE),
}
"""A form for each decision, and what has to be there first."""

EFFECTS = (
    "SELECT 'message', status, parent IS NOT NULL FROM dlq_messages",
    "SELECT 'move', from_status, to_status FROM dlq_transitions WHERE from_status IS DISTINCT FROM to_status",
    "SELECT 'row of ' || kind, state FROM dlq_actions JOIN dlq_action_rows ON action_id = id",
    "SELECT 'plan', state, progress ? 'released', progress ? 'approved', progress -> 'per_second' FROM dlq_plans",
    "SELECT 'paused', progress ? 'paused' FROM dlq_plans",
    "SELECT 'item', state FROM dlq_plan_items",
    "SELECT 'reserved', count(*) FROM dlq_messages WHERE plan_id IS NOT NULL",
    "SELECT 'group', held_at IS NOT NULL, acknowledged_at IS NOT NULL, note FROM dlq_groups",
    "SELECT 'event', max_retries FROM dlq_event_config",
    "SELECT 'rule', strategy FROM dlq_rules",
)


def effects(scene: Scene) -> Effects:
    """What decisions leave behind, without who and when: the log of actions may name one twice that changes nothing."""
    with psycopg.connect(scene.address) as store:
        return Counter(line for query in EFFECTS for line in store.execute(query))


@contextlib.contextmanager
def world(link: CuttingLink, database_url: str, broker_url: str) -> Iterator[Scene]:
    options = {"broker_url": broker_url, "replay_approval": 8}
    console, dying = made(database_url, **options), made(link.url, **options)
    with client(broker_url) as team, opened(console) as steady, opened(dying) as cut:
        for browser, its in ((steady, console), (cut, dying)):
            as_role(browser, its, Role.ADMIN, may_reveal=True)
        yield Scene(console, dying, steady, cut, link, team)


@pytest.fixture
def scene(database_url: str, broker_url: str) -> Iterator[Scene]:
    with CuttingLink(database_url) as link, world(link, database_url, broker_url) as found:
        yield found


@pytest.mark.parametrize("path", FORMS)
def test_a_decision_that_is_cut_is_done_or_not_and_the_same_form_does_no_more(scene: Scene, path: str) -> None:
    whole = uncut(scene, path)
    is_done: list[bool] = []
    while is_done[-2:] != [True, True]:
        found = cut(scene, path, len(is_done) + 1, is_heard=False, whole=whole)
        if found is None:
            break
        is_done.append(found)
    # Nothing before one of its commits, and all of it from there.
    assert is_done == sorted(is_done)
    assert is_done[:1] == [False]
    assert cut(scene, path, is_done.count(False), is_heard=True, whole=whole)


def uncut(scene: Scene, path: str) -> Effects:
    form = FORMS[path](scene)
    before = effects(scene)
    answer = scene.cut.post(form.place, data=dict(form.fields))
    assert answer.status_code == 303, text_of(answer)
    whole = difference(before, effects(scene))
    assert whole
    return whole


def cut(scene: Scene, path: str, number: int, *, is_heard: bool, whole: Effects) -> bool | None:
    """Whether the decision was done when its console was cut off at this commit; None if it has fewer.

    The same form, sent again, does what is missing and no more.
    """
    form = FORMS[path](scene)
    before = effects(scene)
    scene.dying.engine.dispose()  # as a process that has just been started, so that each turn has the same commits
    scene.link.cut_next(number, is_heard=is_heard)
    answer = scene.cut.post(form.place, data=dict(form.fields))
    if not scene.link.has_cut.is_set():
        assert answer.status_code == 303, text_of(answer)
        return None
    assert answer.status_code == 503, text_of(answer)
    assert "look there before you send the form again" in text_of(answer)
    found = difference(before, effects(scene))
    assert found in ({}, whole)
    again = scene.steady.post(form.place, data=dict(form.fields))
    assert again.status_code in {200, 303, 409, 422}, text_of(again)
    assert difference(before, effects(scene)) == whole, text_of(again)
    return bool(found)


def test_a_plan_that_was_cut_before_its_risks_were_found_says_so(database_url: str, broker_url: str) -> None:
    with (
        CuttingLink(database_url, 1, text=b"UPDATE dlq_plans SET risks") as link,
        world(link, database_url, broker_url) as scene,
    ):
        form = plan_of_five(scene)
        assert scene.cut.post(form.place, data=dict(form.fields)).status_code == 503
        assert link.has_cut.is_set()
        page = text_of(scene.steady.get(scene.done(form)))
        assert "not-examined 5 the program ended before it could look for risks" in page
        assert "No risk was found" not in page


def difference(before: Effects, after: Effects) -> Effects:
    lines = {line: after.get(line, 0) - before.get(line, 0) for line in before | after}
    return {line: more for line, more in lines.items() if more}


def test_each_form_of_the_route_table_is_tried() -> None:
    forms = {route.path for route in routes() if route.changes and not route.is_api}
    assert forms - DECIDES_NOTHING - CUT_ELSEWHERE == FORMS.keys()
