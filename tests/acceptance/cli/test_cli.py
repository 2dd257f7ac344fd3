from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from every_command import leaves
from program import DLQ, HANDLER, RETRY_QUEUE, ROOT, Client, Program, client, eventually
from typer.main import get_command

from dlqbatch.cli.commands import application

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

ORIGIN = "orders-queue"


def commands(found: Any, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(found, "commands", {}).items():
        yield from commands(inner, *path, name)


@pytest.mark.parametrize("path", list(commands(get_command(application()))), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        done = Program({}).run(*path, flag)
        assert (done.code, done.err) == (0, "")
        assert f"Usage: {' '.join(('dlqbatch', *path))}" in done.out
    assert not re.search(r"(?i)\bTODO\b", done.out)


# --- help at 80 columns ----------------------------------------------------------------------------------------------

LEAVES = list(leaves(get_command(application())))


def command_at(path: tuple[str, ...]) -> Any:
    found: Any = get_command(application())
    for name in path:
        found = found.commands[name]
    return found


@pytest.mark.parametrize("path", list(commands(get_command(application()))), ids=" ".join)
def test_a_help_page_fits_80_columns_and_ends_with_what_every_command_has(path: tuple[str, ...]) -> None:
    out = Program({}).run(*path, "--help", COLUMNS="80").out
    lines = out.rstrip().splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert not re.search(r"<bool>|<list|\d{10,}|<=x", out)
    command = command_at(path)
    # Whatever an option means stands there in whole words.
    words = out.split()
    for one in command.params:
        meaning = (one.help or "").split()
        assert any(words[at : at + len(meaning)] == meaning for at in range(len(words))), one.name
    if not path or hasattr(command, "commands"):
        return
    names = [one.name for one in command.params]
    ends = [line.split()[0] for line in lines if line.startswith(("  -s,", "  -c,"))]
    assert ends == [short for short, name in (("-c,", "config"), ("-s,", "settings")) if name in names]
    if ends:
        assert [line.split()[0] for line in lines[-len(ends) :]] == ends


def test_the_commands_are_in_groups() -> None:
    out = Program({}).run("--help", COLUMNS="80").out
    titles = ("Jobs", "At night", "Set-up", "Other", "Options")
    groups: dict[str, set[str]] = {title: set() for title in titles}
    title = ""
    for line in out.splitlines():
        title = next((one for one in titles if line.startswith(one)), title)
        if title and re.match(r"  \w", line):
            groups[title].add(line.split()[0])
    assert {"drain", "ingest", "check", "lifecycle", "retain", "monitor"} <= groups["Jobs"]
    assert {"status", "messages", "replay"} <= groups["At night"]
    assert {"doctor", "topology", "db", "events", "rules"} <= groups["Set-up"]
    assert set().union(*groups.values()) == set(command_at(()).commands)


def test_replay_tells_the_order_of_its_commands() -> None:
    out = Program({}).run("replay", "--help").out
    assert "plan -> apply or release -> status or abort" in " ".join(out.split())
    order = [out.index(f"  dlqbatch replay {name}") for name in ("plan", "apply", "status", "abort")]
    assert order == sorted(order)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_example_of_the_help_works(
    program: Program, broker_addresses: tuple[str, str], tmp_path: Path, path: tuple[str, ...]
) -> None:
    (tmp_path / "cold").mkdir()
    installed = program.but(
        management_url=broker_addresses[1],
        cold_storage=str(tmp_path / "cold"),
        check_queues="retry-queue",
        ingest_queues=DLQ,
        schedule_drain="* * * * *",
    )
    shown = [shlex.split(line) for line in installed.run(*path, "--help").out.splitlines() if line.startswith("  dlqb")]
    assert shown
    for words in shown:
        assert words[: 1 + len(path)] == ["dlqbatch", *path]
        if path == ("schedule",) and "--dry-run" not in words:
            continue  # it runs until a signal, and its own tests see to that
        if path == ("console",) and "--new-token" not in words:
            continue
        if path == ("monitor",) and "--prometheus" in words:
            words[-1] = str(tmp_path / "dlqbatch.prom")
        if path == ("check",):
            words[2] = "retry-queue"  # one that is there
        if "--head" in words or path == ("peek",):
            with client(program.settings["broker_url"]) as team:
                team.channel.queue_declare(words[2], durable=True)
        done = installed.run(*words[1:])
        assert done.code in {0, 1, 3} or "NoSuchPlan" in done.err, done.said
        assert "UsageError" not in done.said


@pytest.mark.parametrize("path", [(), ("replay",), ("replay", "plan"), ("help",)], ids=" ".join)
def test_help_is_a_command_too(path: tuple[str, ...]) -> None:
    done = Program({}).run("help", *path)
    assert (done.code, done.out) == (0, Program({}).run(*(one for one in path if one != "help"), "--help").out)


def test_help_for_a_command_that_is_not_there_says_so() -> None:
    done = Program({"log_format": "text"}).run("help", "replays")
    assert done.code == 2
    assert "No such command 'replays'. Did you mean 'replay'?" in done.err


def test_a_wrong_option_without_a_command_is_answered_without_a_job(program: Program) -> None:
    done = program.but(log_format="text").run("-v")
    assert (done.code, done.out) == (2, "")
    assert done.err == "dlqbatch: No such option: -v\ndlqbatch: `dlqbatch --help` shows what there is.\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options_and_never_starts_a_run(
    program: Program, team: Client, shell: str
) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")

    def completed(typed: str) -> str:
        *before, _ = words = typed.split(" ")
        asked = {
            "_DLQBATCH_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(before)),
            "_TYPER_COMPLETE_ARGS": " ".join(words),
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        done = program.run(**asked)
        assert (done.code, done.err) == (0, ""), done.said
        return done.out

    assert "lifecycle" in completed("dlqbatch life")
    assert "abort" in completed("dlqbatch replay ab")
    assert "--resume-stopped" in completed("dlqbatch replay apply --res")
    assert program.run(_DLQBATCH_COMPLETE="nonsense").code == 1
    assert team.depth(RETRY_QUEUE) == 1


def test_the_script_for_completion_is_for_the_installed_command() -> None:
    # The shell is the one that has started the command.
    by_bash = ("bash", "-c", '"$@"; exit $?', "bash", sys.executable, str(HANDLER))
    done = Program({}, by_bash).run("--show-completion")
    assert (done.code, done.err) == (0, "")
    assert "_DLQBATCH_COMPLETE=complete_" in done.out
    assert done.out.rstrip().endswith("dlqbatch")


def test_the_exit_codes_are_one_table_and_every_command_in_it_links_to_it() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sections = dict(one.partition("\n")[::2] for one in page.split("\n## "))
    assert page.count("| command | code | means |") == 1
    rows = re.findall(r"^\| \[([^]]+)\]\(#([^)]+)\) \| (\d+) \|", sections["Exit codes"], re.MULTILINE)
    assert {tuple(path.split()) for path, _, _ in rows} <= set(LEAVES)
    for path, anchor, code in rows:
        assert anchor == f"dlqbatch {path}".replace(" ", "-")
        assert re.search(rf"\[Exit codes\]\(#exit-codes\): .*\b{code}\b", sections[f"dlqbatch {path}"]), path
    said_elsewhere = [
        name for name, text in sections.items() if name != "Exit codes" and re.search("(?i)exit code is", text)
    ]
    assert said_elsewhere == []


def test_the_reference_has_every_option_of_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sections = dict(one.partition("\n")[::2] for one in page.split("\n## "))
    shared = re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", sections["Shared options"], re.MULTILINE)
    for path in LEAVES:
        everywhere = [
            name for name, which in shared if which.startswith("every command") and f"`{' '.join(path)}`" not in which
        ]
        text = sections[f"dlqbatch {' '.join(path)}"] + " ".join(everywhere)
        for one in command_at(path).params:
            if one.param_type_name == "option" and not one.hidden:
                assert all(name in text for name in (*one.opts, *one.secondary_opts)), (path, one.name)


def test_every_command_has_json() -> None:
    for path in LEAVES:
        assert [one for one in command_at(path).params if "--json" in one.opts], path


@pytest.mark.parametrize("command", [("-m", "dlqbatch"), ("-c", "CONSOLE SCRIPT")])
def test_every_way_to_start_it_is_the_same_command_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    if command[0] == "-c":
        # What an installer writes into the script.
        target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dlqbatch"]
        module, _, function = target.partition(":")
        command = ("-c", f"import sys; from {module} import {function}; sys.exit({function}())")
    # A line of JSON holds its time.
    settings = {"database_url": f"sqlite:///{tmp_path / 'x.sqlite3'}", "log_format": "text"}
    other = Program(settings, (sys.executable, *command))
    for arguments in (
        ("--help",),
        ("--version",),
        ("drain", "--help"),
        ("events", "list"),
        ("drain", "--max-messages", "0"),
        ("x",),
    ):
        found, expected = other.run(*arguments, cwd=ROOT), Program(settings).run(*arguments)
        assert (found.code, found.out, found.err) == (expected.code, expected.out, expected.err)


def test_a_bare_start_is_one_drain(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    done = program.run()
    assert done.code == 0, done.said
    assert done.out.startswith("drain: ok, stopped by empty")
    assert re.search(r"^ +got +1$", done.out, re.MULTILINE)
    assert re.search(r"^ +delayed +1$", done.out, re.MULTILINE)
    team.await_depth("retry-queue-1", 1)


@pytest.mark.parametrize("given", [(), ("--json",), ("--dry-run",)])
def test_a_start_without_a_command_runs_the_job_that_the_settings_name(
    program: Program, team: Client, tmp_path: Path, given: tuple[str, ...]
) -> None:
    program.run("topology", "apply")
    said = program.but(job="check", check_queues="retry-queue").run(*given).out
    assert "check" in said
    assert "drain" not in said
    config = tmp_path / "other.properties"
    config.write_text("dlqbatch.job=check\ndlqbatch.check-queues=retry-queue\n")
    for words in (
        ("--config", str(config)),
        (f"--config={config}",),
        ("-s", "job=check", "-s", "check_queues=retry-queue"),
        ("-sjob=check", "-scheck_queues=retry-queue"),
        ("--set=job =check", "--set", "check_queues=retry-queue"),
        (f"-c{config}",),
    ):
        told = program.run(*words, "--json").told
        assert told["job"] == "check", words


def test_a_bare_start_on_empty_queues_loads_neither_parser_nor_database(program: Program) -> None:
    script = (
        "import runpy, sys\n"
        f"sys.argv = [{HANDLER!r}]\n"
        "try:\n"
        f"    runpy.run_path({HANDLER!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = Program(program.settings, (sys.executable, "-c", script)).run(cwd=ROOT)
    code, *loaded = done.out.splitlines()[-1].split()
    assert code == "0", done.said
    assert "pika" in loaded
    assert {"typer", "rich", "sqlalchemy", "psycopg", "alembic", "apscheduler", "boto3"}.isdisjoint(loaded)


def test_the_working_directory_decides_nothing(program: Program, team: Client, tmp_path: Path) -> None:
    (tmp_path / "application.properties").write_text("dlqbatch.max-messages=1\ndlqbatch.nonsense=1\n")
    (tmp_path / "dlqbatch").mkdir()
    (tmp_path / "dlqbatch" / "__init__.py").write_text("raise SystemExit('the wrong dlqbatch')")
    (tmp_path / "pika.py").write_text("raise SystemExit('the wrong pika')")
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one", b"two")
    done = program.run("drain", "--json", cwd=tmp_path)
    assert done.code == 0, done.said
    assert done.told["counts"]["delayed"] == 2


def test_config_on_the_command_line_goes_before_the_environment(program: Program, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.properties", tmp_path / "theirs.properties"
    ours.write_text("dlqbatch.events.from.ours=1\n")
    theirs.write_text("dlqbatch.events.from.theirs=1\n")
    installed = program.but(config=str(theirs))
    events = {one["event"] for one in installed.run("events", "list", "--json", "--config", str(ours)).told}
    assert "from.ours" in events
    assert "from.theirs" not in events


def test_the_reference_in_the_docs_is_what_the_program_says_of_itself() -> None:
    done = Program({}, (sys.executable, "-m", "dlqbatch.cli.reference")).run(cwd=ROOT)
    again = "run `python -m dlqbatch.cli.reference > docs/cli.md`"
    assert (ROOT / "docs" / "cli.md").read_text() == done.out, again


# --- JSON and exit codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("drain",),
        ("drain", "--dry-run"),
        ("events", "list"),
        ("events", "set", "a.b", "2"),
        ("events", "set", "a.b", "2", "--dry-run"),
        ("events", "remove", "a.b"),
        ("events", "remove", "orders.*", "--dry-run"),
        ("events", "test", "orders.created"),
        ("db", "upgrade"),
        ("db", "upgrade", "--dry-run"),
        ("db", "current"),
        ("db", "sql"),
        ("topology", "apply"),
        ("topology", "apply", "--dry-run"),
    ],
    ids=" ".join,
)
def test_json_is_all_there_is_on_stdout_and_logs_are_json_lines_on_stderr(
    program: Program, arguments: tuple[str, ...]
) -> None:
    done = program.run(*arguments, "--json")
    assert done.code in (0, 1), done.said
    assert isinstance(done.told, (dict, list))
    for line in done.err.splitlines():
        assert json.loads(line)["event"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(("drain", "--max-messages", "x"), "UsageError"), (("drain", "--max-messages", "0"), "SettingsError")],
)
def test_an_error_is_json_too_when_json_is_asked_for(program: Program, arguments: tuple[str, ...], kind: str) -> None:
    done = program.run(*arguments, "--json")
    assert done.code == 2
    assert done.told["outcome"] == "failed"
    assert done.told["error"]["type"] == kind
    assert "--max-messages" in done.told["error"]["message"]
    assert "--max-messages" in done.err


def test_exit_code_0_is_done(program: Program) -> None:
    assert program.run("drain").code == 0


def test_exit_code_1_is_asked_for_what_is_not_there(program: Program) -> None:
    assert program.run("events", "remove", "no.such.event").code == 1
    assert program.run("events", "test", "no.such.event").code == 1


def test_exit_code_2_is_usage_and_says_where_the_help_is(program: Program) -> None:
    for arguments, words in (
        (("drian",), "Did you mean 'drain'?"),
        (("drain", "--max-message", "5"), "--max-messages"),
        (("events", "set"), "name"),
        (("drain", "-s", "foo"), "OPTION=VALUE"),
    ):
        done = program.run(*arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
        assert "--help` shows what there is" in done.err


def test_exit_code_2_is_configuration(program: Program) -> None:
    done = program.run("drain", "-s", "max_mesages=5")
    assert done.code == 2
    assert "perhaps -s max_messages was meant" in done.err
    done = program.but(job="drian").run()
    assert done.code == 2
    assert "there is no job 'drian'; the jobs are: drain" in done.err


def test_exit_code_3_is_partial_and_what_was_left_is_counted_with_its_reason(
    program: Program, team: Client, management: Management
) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "not.configured", b"one", b"two")
    team.fail(ORIGIN, "orders.created", b"three")
    full = {"pattern": f"^{DLQ}$", "definition": {"max-length": 0, "overflow": "reject-publish"}, "apply-to": "queues"}
    management.put(f"policies/{management.vhost}/full", full)
    assert eventually(lambda: management.queue(DLQ).get("policy") == "full")

    done = program.run("drain", "--json")

    assert done.code == 3, done.said
    told = done.told
    assert (told["outcome"], told["reasons"]) == ("partial", {"not-confirmed": 2})
    assert (told["counts"]["got"], told["counts"]["left"], told["counts"]["delayed"]) == (3, 2, 1)
    assert [one.body for one in team.contents(RETRY_QUEUE)] == [b"one", b"two"]
    assert "docs/drain.md" in program.run("drain").out


def test_exit_code_4_is_unreachable(program: Program) -> None:
    assert program.but(broker_url="amqp://127.0.0.1:1/", connect_timeout_seconds="0.3").run("drain").code == 4


# --- the policy and the schema ---------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def with_database(request: pytest.FixtureRequest, sqlite_url: str) -> Program:
    url = sqlite_url if request.param == "sqlite" else request.getfixturevalue("database_url")
    return Program({"database_url": url})


def test_the_schema_is_made_once_and_its_version_told(with_database: Program) -> None:
    def version() -> Any:
        return with_database.run("db", "current", "--json").told[0]["version"]

    assert version() is None
    assert with_database.run("db", "upgrade", "--dry-run").code == 0
    assert version() is None
    (first,) = with_database.run("db", "upgrade", "--json").told
    (second,) = with_database.run("db", "upgrade", "--json").told
    assert first["before"] is None
    assert first["after"] == second["before"] == second["after"] == version()
    shown = with_database.run("db", "upgrade").out
    assert first["database"] in shown


def test_the_schema_can_be_written_down_for_either_database() -> None:
    for dialect in ("postgresql", "sqlite"):
        done = Program({}).run("db", "sql", dialect)
        assert done.code == 0
        assert "dlq_event_config" in done.out
        assert Program({}).run("db", "sql", dialect, "--json").told == {"dialect": dialect, "sql": done.out}


def test_the_policy_is_listed_set_explained_and_removed(with_database: Program, tmp_path: Path) -> None:
    file = tmp_path / "application.properties"
    file.write_text("dlqbatch.events.payment.#=0\ndlqbatch.events.orders.#.delays=10s,1m\n")
    installed = with_database.but(config=str(file))

    def listed() -> list[tuple[str, int | None, str]]:
        return [
            (one["event"], one["max_retries"], one["from"]) for one in installed.run("events", "list", "--json").told
        ]

    assert installed.run("events", "list").code == 2  # there is no table
    installed.run("db", "upgrade")
    in_file = ("payment.#", 0, "application.properties")
    assert listed() == [in_file]

    assert installed.run("events", "set", "orders.*", "5", "--dry-run").code == 0
    assert listed() == [in_file]
    assert installed.run("events", "set", "orders.*", "5").code == 0
    assert installed.run("events", "set", "with.default").code == 0
    assert installed.run("events", "set", "orders.*", "6").code == 0
    assert listed() == [("orders.*", 6, "table"), ("with.default", None, "table"), in_file]

    def explained(key: str) -> tuple[int, Any, Any]:
        done = installed.run("events", "test", key, "--json")
        return done.code, done.told[0]["max_retries"], done.told[0]["rule"]

    assert explained("orders.created") == (0, 6, "orders.*")
    assert explained("with.default") == (0, 3, "with.default")
    assert explained("payment.card.failed") == (0, 0, "payment.#")
    assert explained("other") == (1, None, None)
    assert "not configured" in installed.run("events", "test", "other").out
    (told,) = installed.run("events", "test", "orders.created", "--json").told
    assert (told["delays"], told["delays_by"]) == ([10, 60], "orders.#")
    assert "delays by the tiers: 10s, 15s, 20s" in installed.run("events", "test", "with.default").out
    assert "'orders.#' has the delays 10s, 60s." in installed.run("events", "list").out

    assert installed.run("events", "remove", "orders.*", "--dry-run").code == 0
    assert len(listed()) == 3
    assert installed.run("events", "remove", "orders.*").code == 0
    assert installed.run("events", "remove", "orders.*").code == 1
    assert listed() == [("with.default", None, "table"), in_file]


@pytest.mark.parametrize("retries", ["-1", "2147483648", "three", "1.5"])
def test_a_number_of_retries_that_cannot_be_is_refused(program: Program, retries: str) -> None:
    done = program.run("events", "set", "orders.new", "--", retries)
    assert (done.code, done.out) == (2, "")
    assert "orders.new" not in program.run("events", "list").out


def test_a_table_in_a_pipe_has_a_line_for_each_row_however_long(program: Program) -> None:
    name = "a" * 100
    program.run("events", "set", name)
    assert any(line.startswith(name) for line in program.run("events", "list").out.splitlines())


def test_a_table_on_a_narrow_terminal_is_folded_and_nothing_is_cut(program: Program) -> None:
    name = "x" * 90
    program.run("events", "set", name)
    done = program.on_terminal("events", "list", columns=60)
    assert done.code == 0
    assert done.out.count("x") >= 90
    assert "…" not in done.out
