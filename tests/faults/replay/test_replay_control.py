"""Pause, resume and rate from anywhere: after a pause has returned nothing more arrives until somebody resumes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from program import HANGS_AFTER, client
from ready_store import make_tables
from replay_rows import ORIGIN
from replay_scene import PARTIAL, SLOWLY, Scene

from dlqbatch.replay.plan import status

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Scene]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Scene(broker_url, url, team)


def control(scene: Scene, *arguments: str, code: int = 0) -> dict[str, object]:
    done = scene.program.run("replay", *arguments, "--json")
    assert done.code == code, done.said
    return dict(done.told)


@pytest.mark.parametrize(("pace", "size", "out"), [(SLOWLY, 60, 3), ((), 6_000, 300)], ids=["5/s", "full speed"])
def test_nothing_arrives_after_a_pause_has_returned_until_it_is_resumed(
    scene: Scene, pace: tuple[str, ...], size: int, out: int
) -> None:
    name = scene.plan(size)
    process = scene.sends(name, "--wait", "3600", *pace, out=out)
    paused = control(scene, "pause", name, "--actor", "bob", "--reason", "the api is down")
    depth = scene.team.depth(ORIGIN)
    assert (paused["state"], paused["sent"], paused["held"]) == ("stopped", depth, 0)
    assert "paused by bob: the api is down" in str(paused["do_next"])
    assert depth < size
    # A second pause changes nothing; and another apply refuses.
    assert control(scene, "pause", name)["stopped_why"] == paused["stopped_why"]
    refused = scene.program.run("replay", "apply", name)
    assert (refused.code, f"replay resume {name}" in refused.err) == (2, True), refused.said
    assert (scene.team.depth(ORIGIN), process.poll()) == (depth, None)
    control(scene, "rate", name, "none")
    control(scene, "resume", name)
    told, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 0, told + err
    assert sorted(int(message.body) for message in scene.team.contents(ORIGIN)) == list(range(size))
    (waited,) = json.loads(told)["waited"]
    assert "paused by bob" in waited["for"]


def test_a_killed_apply_leaves_a_paused_plan_that_goes_on(scene: Scene) -> None:
    name = scene.plan(60)
    process = scene.sends(name, "--wait", "3600", *SLOWLY, out=3)
    control(scene, "pause", name)
    process.kill()
    process.communicate()
    control(scene, "resume", name)
    control(scene, "rate", name, "none")
    done = control(scene, "apply", name, "--no-canary")
    assert done["outcome"] == "ok"
    assert sorted(int(message.body) for message in scene.team.contents(ORIGIN)) == list(range(60))


def test_a_rate_is_changed_while_the_plan_is_sent(scene: Scene) -> None:
    name = scene.plan(40)
    process = scene.sends(name, "--rate", "1/min", out=1)
    assert control(scene, "rate", name, "slower")["per_second"] == pytest.approx(1 / 120)
    assert control(scene, "rate", name, "faster")["per_second"] == pytest.approx(1 / 60)
    assert control(scene, "rate", name, "600/s")["per_second"] == 600
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 0, out + err
    assert scene.team.depth(ORIGIN) == 40


def test_what_cannot_be_paused_or_hastened_is_refused(scene: Scene) -> None:
    name = scene.plan(1)
    for arguments in (("pause", name), ("resume", name), ("rate", name, "faster"), ("rate", name, "soon")):
        refused = scene.program.run("replay", *arguments)
        assert refused.code == 2, refused.said
        assert (name in refused.err) or ("50/s" in refused.err), refused.said
    assert status(scene.engine, name).state == "planned"


def test_a_paused_plan_keeps_its_canary_and_a_stopped_one_begins_anew(scene: Scene) -> None:
    name = scene.plan(30)
    assert control(scene, "apply", name, "--wait", "0", code=PARTIAL)["plan"]["step"] == 4  # type: ignore[index]
    control(scene, "pause", name)
    resumed = control(scene, "resume", name)
    assert (resumed["step"], status(scene.engine, name).counted.sent) == (4, 4)
