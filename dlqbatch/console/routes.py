"""The route table of the console: every address, the role that it takes, and the function that answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dlqbatch.console import (
    actions,
    api,
    api_groups,
    api_messages,
    api_replay,
    decisions,
    edits,
    entrance,
    groups,
    head,
    messages,
    now,
    oidc,
    operations,
    plans,
    policy,
    schema,
)
from dlqbatch.console.gate import Route
from dlqbatch.console.rights import Role

_READER, _OPERATOR, _ADMIN = Role.READER, Role.OPERATOR, Role.ADMIN

_TABLE: Final = (
    Route("GET", "/login", None, entrance.show, "log in"),
    Route("POST", "/login", None, entrance.enter, "log in"),
    Route("GET", "/login/oidc", None, oidc.start, "log in"),
    Route("GET", oidc.BACK, None, oidc.back, "log in"),
    Route("POST", "/logout", Role.READER, entrance.leave, "log out"),
    Route("GET", "/", _READER, now.show, "now"),
    Route("GET", "/live/now", _READER, now.live, "live"),
    Route("GET", "/messages", _READER, messages.listing, "list messages"),
    Route("POST", "/messages", _READER, messages.pasted, "list pasted messages"),
    Route("GET", "/messages/{id}", _READER, messages.one, "show a message"),
    Route("POST", "/messages/{id}/edit/open", _OPERATOR, decisions.ask_edit, "look at an edit", reveals=True),
    Route("POST", "/messages/{id}/edit", _OPERATOR, decisions.edit, "edit a message", reveals=True),
    Route("GET", "/discard", _OPERATOR, decisions.ask_discard, "look at a discard"),
    Route("POST", "/discard", _OPERATOR, decisions.discard, "discard messages"),
    Route("GET", "/restore", _OPERATOR, decisions.ask_restore, "look at a restore"),
    Route("POST", "/restore", _OPERATOR, decisions.restore, "restore messages"),
    Route("GET", "/edit", _OPERATOR, edits.ask, "look at edits", reveals=True),
    Route("POST", "/edit", _OPERATOR, edits.edit, "edit messages", reveals=True),
    Route("GET", "/groups/{fingerprint}", _READER, groups.show, "show a group"),
    Route("POST", "/groups/{fingerprint}/hold", _OPERATOR, groups.hold, "hold the group"),
    Route("POST", "/groups/{fingerprint}/unhold", _OPERATOR, groups.unhold, "lift the hold"),
    Route("POST", "/groups/{fingerprint}/acknowledge", _OPERATOR, groups.acknowledge, "acknowledge the group"),
    Route("POST", "/groups/{fingerprint}/note", _OPERATOR, groups.note, "note on the group"),
    Route("GET", "/plans", _READER, plans.listing, "list plans"),
    Route("GET", "/plan", _OPERATOR, plans.ask, "look at a new plan"),
    Route("POST", "/plans", _OPERATOR, plans.make, "plan a replay"),
    Route("GET", "/plans/{hash}", _READER, plans.show, "show a plan"),
    Route("GET", "/live/plans/{hash}", _READER, plans.live, "live"),
    Route("POST", "/plans/{hash}/release", _OPERATOR, plans.release, "release a plan"),
    Route("POST", "/plans/{hash}/approve", _OPERATOR, plans.approve, "approve a plan"),
    Route("POST", "/plans/{hash}/abort", _OPERATOR, plans.abort, "abort a plan"),
    Route("POST", "/plans/{hash}/pause", _OPERATOR, plans.pause, "pause a plan"),
    Route("POST", "/plans/{hash}/resume", _OPERATOR, plans.resume, "resume a plan"),
    Route("POST", "/plans/{hash}/rate", _OPERATOR, plans.rate, "change the rate of a plan"),
    Route("GET", "/head", _OPERATOR, head.ask, "look at taking the head of a queue"),
    Route("POST", "/head", _OPERATOR, head.take, "take the head of a queue"),
    Route("GET", "/actions", _READER, actions.listing, "list actions"),
    Route("GET", "/actions/{name}", _READER, actions.show, "show an action"),
    Route("POST", "/actions/{name}/undo", _OPERATOR, actions.undo, "undo an action"),
    Route("GET", "/events", _READER, policy.events, "list events"),
    Route("GET", "/events/try", _READER, policy.try_events, "try events on history"),
    Route("POST", "/events", _ADMIN, policy.set_event, "set an event"),
    Route("POST", "/events/remove", _ADMIN, policy.remove_event, "remove an event"),
    Route("GET", "/rules", _READER, policy.rules, "list rules"),
    Route("POST", "/rules", _ADMIN, policy.set_rule, "set a rule"),
    Route("POST", "/rules/remove", _ADMIN, policy.remove_rule, "remove a rule"),
    Route("GET", "/runs", _READER, operations.runs, "list runs"),
    Route("GET", "/alerts", _READER, operations.alerts, "list alerts"),
    Route("GET", "/doctor", _READER, operations.doctor, "doctor"),
    Route("GET", "/journal", _READER, operations.journal, "list the journal"),
    Route("GET", "/settings", _READER, operations.settings, "list the settings"),
    Route("POST", "/messages/{id}/reveal", _READER, messages.reveal, "reveal a message", reveals=True),
    Route("POST", "/messages/{id}/file", _READER, messages.file, "save a message's body", reveals=True),
)


_V1: Final = "/api/v1"
_API: Final = (
    Route("GET", f"{_V1}/openapi.json", _READER, api.document, "describe the API"),
    Route("GET", f"{_V1}/me", _READER, api.me, "say who the login is of"),
    Route("GET", f"{_V1}/status", _READER, api.status, "status"),
    Route("GET", f"{_V1}/status/figures", _READER, api.figures, "status, as figures"),
    Route("GET", f"{_V1}/messages", _READER, api.messages, "messages list", asks=("filter", "limit", "after")),
    Route("GET", f"{_V1}/messages/{{id}}", _READER, api.message, "messages show"),
    Route(
        "POST",
        f"{_V1}/messages/{{id}}/reveal",
        _READER,
        api.message_unmasked,
        "messages show --reveal",
        reveals=True,
        shows_content=True,
        takes=schema.REASON,
    ),
    Route("POST", f"{_V1}/discard", _OPERATOR, api.discard, "messages discard", takes=schema.DISCARD),
    Route("POST", f"{_V1}/restore", _OPERATOR, api.restore, "messages restore", takes=schema.RESTORE),
    Route("POST", f"{_V1}/edit", _OPERATOR, api_messages.edit, "messages edit", reveals=True, takes=schema.EDIT),
    Route("GET", f"{_V1}/messages/groups", _READER, api_messages.groups, "messages groups", asks=("filter", "limit")),
    Route("GET", f"{_V1}/messages/near", _READER, api_messages.near, "say why nothing matches", asks=("filter",)),
    Route("GET", f"{_V1}/messages/missing", _READER, api_messages.missing, "say what is not there", asks=("filter",)),
    Route("GET", f"{_V1}/fields", _READER, api_messages.fields, "find fields with a value", asks=("sought",)),
    Route(
        "GET",
        f"{_V1}/search",
        _READER,
        api_messages.search,
        "messages search",
        asks=("sought", "filter", "limit", "after", "max-seconds"),
    ),
    Route(
        "POST",
        f"{_V1}/messages/{{id}}/original",
        _OPERATOR,
        api_messages.original,
        "look at a message to edit",
        reveals=True,
        shows_content=True,
        takes=schema.ORIGINAL,
    ),
    Route(
        "POST",
        f"{_V1}/messages/{{id}}/edit",
        _OPERATOR,
        api_messages.edit_one,
        "messages edit ID",
        reveals=True,
        takes=schema.EDIT_ONE,
    ),
    Route("GET", f"{_V1}/groups", _READER, api.groups, "groups list", asks=("filter", "limit")),
    Route("GET", f"{_V1}/groups/{{group}}", _READER, api_groups.show, "groups show"),
    Route("POST", f"{_V1}/groups/{{group}}/hold", _OPERATOR, api_groups.hold, "groups hold", takes=schema.HOLD),
    Route("POST", f"{_V1}/groups/{{group}}/unhold", _OPERATOR, api_groups.unhold, "groups unhold", takes=schema.HOLD),
    Route("POST", f"{_V1}/groups/{{group}}/ack", _OPERATOR, api_groups.ack, "groups ack", takes=schema.ACK),
    Route("POST", f"{_V1}/groups/{{group}}/note", _OPERATOR, api_groups.note, "groups note", takes=schema.NOTE),
    Route(
        "GET", f"{_V1}/journal", _READER, api.journal, "messages journal", asks=("message", "actor", "since", "limit")
    ),
    Route("GET", f"{_V1}/runs", _READER, api.runs, "runs", asks=("job", "limit", "after")),
    Route("GET", f"{_V1}/plans", _READER, api_replay.plan_list, "replay status", asks=("limit",)),
    Route("POST", f"{_V1}/plans", _OPERATOR, api_replay.make_plan, "replay plan", takes=schema.PLAN),
    Route("GET", f"{_V1}/plans/{{hash}}", _READER, api_replay.plan, "replay status HASH"),
    Route(
        "POST",
        f"{_V1}/plans/{{hash}}/release",
        _OPERATOR,
        api_replay.release_plan,
        "replay release",
        takes=schema.RELEASE,
    ),
    Route(
        "POST",
        f"{_V1}/plans/{{hash}}/approve",
        _OPERATOR,
        api_replay.approve_plan,
        "replay approve",
        takes=schema.REASON,
    ),
    Route("POST", f"{_V1}/plans/{{hash}}/pause", _OPERATOR, api_replay.pause_plan, "replay pause", takes=schema.PAUSE),
    Route(
        "POST",
        f"{_V1}/plans/{{hash}}/resume",
        _OPERATOR,
        api_replay.resume_plan,
        "replay resume",
        takes=schema.body({}),
    ),
    Route("POST", f"{_V1}/plans/{{hash}}/rate", _OPERATOR, api_replay.rate_of_plan, "replay rate", takes=schema.RATE),
    Route(
        "POST", f"{_V1}/plans/{{hash}}/abort", _OPERATOR, api_replay.abort_plan, "replay abort", takes=schema.body({})
    ),
    Route("GET", f"{_V1}/actions", _READER, api.action_list, "actions list", asks=("by", "kind", "limit")),
    Route("GET", f"{_V1}/actions/{{name}}", _READER, api.action, "actions show", asks=("limit", "after", "state")),
    Route("POST", f"{_V1}/actions/{{name}}/undo", _OPERATOR, api.undo, "undo", takes=schema.UNDO),
    Route("GET", f"{_V1}/events", _READER, api.events, "events list"),
    Route("POST", f"{_V1}/events", _ADMIN, api.set_event, "events set", takes=schema.EVENT),
    Route(
        "POST",
        f"{_V1}/events/simulate",
        _READER,
        api.simulate,
        "events simulate",
        takes=schema.SIMULATE,
        is_question=True,
    ),
    Route("GET", f"{_V1}/jobs/replay", _READER, api_replay.job, "say whether the job replay runs"),
    Route("GET", f"{_V1}/rules", _READER, api.rules, "rules list"),
)


def _with_a_body(route: Route) -> Route:
    """The same question as POST: a pasted list of values is longer than an address."""
    what = f"{route.what}, with a long filter"
    return replace(route, method="POST", what=what, takes=schema.question(route.asks), asks=(), is_question=True)


_QUESTIONS: Final = tuple(_with_a_body(route) for route in _API if {"filter", "sought"} & set(route.asks))


def routes() -> tuple[Route, ...]:
    return _TABLE + _API + _QUESTIONS
