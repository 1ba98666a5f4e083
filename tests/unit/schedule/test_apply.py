"""Plans against what they must bring about, and a thousand ways in which carrying them out may be disturbed."""

import functools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.fakes.kfp_server import Request, Server
from helpers.together import Together

from kftrain.core import records
from kftrain.errors import LaunchError, UnavailableError
from kftrain.kubeflow import client as kubeflow
from kftrain.schedule import apply
from kftrain.schedule import turn as turns
from kftrain.schedule.apply import Executor
from kftrain.schedule.plan import Action, Content, Recurring, Wanted, list_changes, plan
from kftrain.schedule.turn import Turn

NIGHTLY = Content("nightly", "0 0 2 * * *", "p-1", "e-1", {"config": "train: {steps: 100}\n", "resume_run": ""})
LATER = replace(NIGHTLY, cron="0 0 3 * * *")
OTHER = replace(NIGHTLY, name="weekly")


def there(identity, content=NIGHTLY, enabled=True, created=""):
    return Recurring(identity, content, enabled, created or identity)


def test_nothing_is_there():
    assert plan(Wanted(NIGHTLY, True), []) == [Action("create"), Action("enable")]
    assert plan(Wanted(NIGHTLY, False), []) == [Action("create")]


def test_what_is_as_wanted_stays():
    assert plan(Wanted(NIGHTLY, True), [there("a")]) == []
    assert plan(Wanted(NIGHTLY, False), [there("a", enabled=False)]) == []
    own = replace(NIGHTLY, service_account="pipeline-runner")
    assert plan(Wanted(NIGHTLY, True), [there("a", own)]) == []  # where none is asked for, Kubeflow names its own


def test_a_change_is_a_new_one_before_the_old_one_goes():
    assert plan(Wanted(LATER, True), [there("a")]) == [
        Action("create"),
        Action("disable", "a"),
        Action("enable"),
        Action("delete", "a"),
    ]
    both = [there("a"), there("b", LATER, enabled=False)]
    assert plan(Wanted(LATER, True), both) == [Action("disable", "a"), Action("enable", "b"), Action("delete", "a")]


def test_of_several_that_are_the_same_the_enabled_one_stays():
    found = [there("a", enabled=False), there("b"), there("c")]
    assert plan(Wanted(NIGHTLY, True), found) == [Action("disable", "c"), Action("delete", "c"), Action("delete", "a")]


def test_a_pause_and_an_end():
    assert plan(Wanted(NIGHTLY, False), [there("a")]) == [Action("disable", "a")]
    assert plan(None, [there("a"), there("b", enabled=False)]) == [
        Action("disable", "a"),
        Action("delete", "a"),
        Action("delete", "b"),
    ]


def test_differences_name_the_field():
    longer = replace(LATER, parameters={"config": "train: {steps: 200}\n", "resume_run": ""})
    found = [str(each) for each in list_changes(Wanted(longer, True), [there("a", enabled=False)])]
    assert found == [
        "config.train.steps: 100 -> 200",
        "cron: 0 0 2 * * * -> 0 0 3 * * *",
        "enabled: False -> True",
    ]
    assert list_changes(Wanted(NIGHTLY, True), [there("a")]) == []
    default = replace(NIGHTLY, parameters={"config": "", "resume_run": ""})
    found = [str(each) for each in list_changes(Wanted(default, True), [there("a")])]
    assert found == ["config.train.steps: 100 -> (default)"]
    assert [str(each) for each in list_changes(Wanted(NIGHTLY, True), [])] == ["schedule: (none) -> nightly"]
    edited = replace(NIGHTLY, parameters={"config": "- [", "resume_run": ""}, version_id="v-1")
    keys = [each.key for each in list_changes(Wanted(NIGHTLY, True), [there("a", edited), there("b", edited)])]
    assert keys == ["config", "config.train.steps", "version_id", "recurring runs of this name"]


class CrashError(BaseException):
    """The process is gone."""


class Folder:
    """The storage root as turns use it, in memory; `before` is called before each call."""

    def __init__(self):
        self.files = {}
        self.before = lambda: None

    def join(self, uri, *parts):
        return "/".join((uri, *parts))

    def list_names(self, uri):
        self.before()
        return sorted(name.removeprefix(f"{uri}/") for name in self.files)

    def create_json(self, uri, document):
        self.before()
        if uri in self.files:
            raise FileExistsError(uri)
        self.files[uri] = document

    def remove(self, uri):
        self.before()
        self.files.pop(uri, None)

    def read_if_exists(self, kind, uri):
        self.before()
        return kind.model_validate(self.files[uri]) if uri in self.files else None


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Where the turns of these tests are kept."""
    found = Folder()
    monkeypatch.setattr(turns, "storage", found)
    monkeypatch.setattr(records, "storage", found)
    monkeypatch.setattr(turns, "documents", SimpleNamespace(read_if_exists=found.read_if_exists))
    return found


class Scripted:
    """The API without a network: each call may fail before or after it took effect, and others act in between."""

    def __init__(self, server, chance=None, crash_at=None):
        self.server = server
        self.now = 0.0
        self.chance = chance
        self.crash_at = crash_at
        self.num_calls = 0
        self.between = lambda: None
        self.enabled_too_many = False

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.between()

    def call(self, respond):
        self.num_calls += 1
        self.between()
        if self.crash_at == self.num_calls:
            raise CrashError
        lost = self.chance.random() if self.chance else 1.0
        if lost < 0.1:
            raise UnavailableError("Kubeflow Pipelines answered 429")
        answer = respond()
        enabled = [each for each in self.server.recurring if each["mode"] == "ENABLE"]
        self.enabled_too_many |= len(enabled) > 1
        if lost < 0.2:
            raise UnavailableError("Kubeflow Pipelines cannot be reached: connection reset")
        if self.crash_at == -self.num_calls:
            raise CrashError
        return answer

    def list_recurring(self, name):
        found = [each for each in self.server.recurring if each["display_name"] == name]
        return self.call(lambda: [self._parsed(each) for each in found])

    def _parsed(self, each):
        content = replace(each["content"], service_account="pipeline-runner")
        return Recurring(each["recurring_run_id"], content, each["mode"] == "ENABLE", each["created_at"])

    def create(self, content):
        self.call(lambda: create(self.server, content))

    def enable(self, identity):
        self.call(lambda: self.server._switch(None, identity, "enable"))

    def disable(self, identity):
        self.call(lambda: self.server._switch(None, identity, "disable"))

    def delete(self, identity):
        self.call(lambda: self.server._delete_recurring(None, identity))

    def list_live_runs(self, identity):
        found = self.server._find_recurring(identity)
        fired = found["fired"] if found else []
        return self.call(lambda: [run["display_name"] for run in fired if run["state"] == "RUNNING"])


def create(server, content, mode="DISABLE"):
    trigger = {"cron_schedule": {"cron": content.cron}}
    body = {"display_name": content.name, "mode": mode, "trigger": trigger, "content": content}
    return server._create_recurring(Request("POST", "/recurringruns", {}, {}, body))


def converge(api, wanted, wait_seconds=0.0, name="nightly"):
    return executor(api, name).converge(lambda: wanted, wait_seconds)


def executor(api, name="nightly"):
    turn = Turn("turns", lambda line: None, api.clock, api.sleep)
    return Executor(api, name, turn, lambda line: None, api.clock, api.sleep)


def content_of(server):
    return [(each["content"].cron, each["mode"]) for each in server.recurring if each["content"].name == "nightly"]


def test_applying_twice_does_it_once():
    api = Scripted(Server())
    assert converge(api, Wanted(NIGHTLY, True)) == []
    calls, now = api.num_calls, api.now
    assert converge(api, Wanted(NIGHTLY, True)) == []
    assert (api.num_calls, api.now) == (calls + 1, now)
    assert content_of(api.server) == [("0 0 2 * * *", "ENABLE")]


def test_the_old_one_stays_until_its_run_has_ended():
    api = Scripted(Server())
    converge(api, Wanted(NIGHTLY, True))
    run = api.server.fire("r-1")
    assert converge(api, Wanted(LATER, True)) == ["r-1"]
    assert content_of(api.server) == [("0 0 2 * * *", "DISABLE"), ("0 0 3 * * *", "ENABLE")]
    end = api.now + 3600

    def end_of_run():
        if api.now > end:
            run["state"] = "SUCCEEDED"

    api.between = end_of_run
    assert converge(api, Wanted(LATER, True), wait_seconds=7200) == []
    assert content_of(api.server) == [("0 0 3 * * *", "ENABLE")] and not api.server.killed


def test_a_run_that_starts_right_after_the_old_one_is_disabled_lives():
    """The controller looks every 30 s."""
    api = Scripted(Server())
    converge(api, Wanted(NIGHTLY, True))
    disabled = []

    def late_firing():
        old = api.server._find_recurring("r-1")
        if old and old["mode"] == "DISABLE" and not disabled:
            disabled.append(api.now)
        if disabled and api.now >= disabled[0] + 30 and not old["fired"]:
            api.server.fire("r-1")

    api.between = late_firing
    assert converge(api, Wanted(LATER, True)) == ["r-1"]
    assert not api.server.killed


def test_the_end_of_a_schedule_waits_for_its_run_and_leaves_others_alone():
    api = Scripted(Server())
    create(api.server, OTHER, "ENABLE")
    converge(api, Wanted(NIGHTLY, True))
    run = api.server.fire("r-2")
    assert converge(api, None) == ["r-2"]
    run["state"] = "FAILED"
    assert converge(api, None) == []
    assert [each["content"].name for each in api.server.recurring] == ["weekly"]


def test_who_undoes_everything_is_not_fought_for_ever():
    api = Scripted(Server())
    api.between = lambda: [each.update(mode="DISABLE") for each in api.server.recurring]
    with pytest.raises(LaunchError, match="somebody changes this schedule"):
        converge(api, Wanted(NIGHTLY, True))


def test_an_api_server_that_stays_away_ends_it():
    api = Scripted(Server())
    api.call = lambda respond: (_ for _ in ()).throw(UnavailableError("away"))
    with pytest.raises(UnavailableError):
        converge(api, Wanted(NIGHTLY, True))
    assert api.now == sum(apply.FIRST_WAIT_SECONDS * 2**n for n in range(apply.MAX_FAILURES))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_crash_at_every_call_and_then_once_more(before, folder):
    """From one content to another, with a run that lives: wherever it ends, the next call brings it to its end."""
    for number in range(1, 40):
        folder.files.clear()
        api = Scripted(Server())
        converge(api, Wanted(NIGHTLY, True))
        run = api.server.fire("r-1")
        api.num_calls, api.crash_at = 0, number if before else -number
        try:
            converge(api, Wanted(LATER, True))
        except CrashError:
            crashed = True
        else:
            crashed = False
        api.crash_at = None
        assert converge(api, Wanted(LATER, True)) == ["r-1"]
        run["state"] = "SUCCEEDED"
        assert converge(api, Wanted(LATER, True)) == []
        assert content_of(api.server) == [("0 0 3 * * *", "ENABLE")]
        assert not api.server.killed and not api.enabled_too_many
        if not crashed:
            return
    raise AssertionError("it did not end")


def disturb(api, chance):
    """What others do while a call is under way: runs begin and end, people press buttons and delete."""
    for each in api.server.recurring:
        if each["mode"] == "ENABLE" and chance.random() < 0.2:
            api.server.fire(each["recurring_run_id"])
        for run in each["fired"]:
            if chance.random() < 0.15:
                run["state"] = "SUCCEEDED"


def edit_by_hand(api, chance):
    if not api.server.recurring:
        return
    each = chance.choice(api.server.recurring)
    kind = chance.randrange(4)
    if kind == 0:
        each["mode"] = "ENABLE" if each["mode"] == "DISABLE" else "DISABLE"
    elif kind == 1 and not any(run["state"] == "RUNNING" for run in each["fired"]):
        api.server.recurring.remove(each)
    elif kind == 2:
        create(api.server, replace(NIGHTLY, cron="0 0 4 * * *"), chance.choice(["ENABLE", "DISABLE"]))
    else:
        each["content"] = replace(each["content"], version_id="v-7")


def end_runs(server):
    for each in server.recurring:
        for run in each["fired"]:
            run["state"] = "SUCCEEDED"


def test_a_thousand_interleavings(folder):
    """Apply, pause, edits by hand, answers that are refused or lost, crashes: one is enabled, no run is killed."""
    num_crashes = num_edits = 0
    for seed in range(1000):
        chance = random.Random(seed)
        folder.files.clear()
        api = Scripted(Server(), chance)
        api.between = lambda api=api, chance=chance: disturb(api, chance)
        edited = False
        for _ in range(chance.randrange(1, 5)):
            wanted = Wanted(replace(NIGHTLY, cron=f"0 0 {chance.randrange(4)} * * *"), chance.random() < 0.7)
            api.num_calls = 0
            api.crash_at = chance.choice([None, 1, -1]) and chance.choice([1, -1]) * chance.randrange(1, 12)
            try:
                converge(api, wanted)
            except CrashError:
                num_crashes += 1
            except LaunchError:
                pass
            if chance.random() < 0.4:
                edit_by_hand(api, chance)
                edited, num_edits = True, num_edits + 1
        assert edited or not api.enabled_too_many, seed
        api.chance, api.crash_at = None, None
        api.between = lambda api=api: end_runs(api.server)
        assert converge(api, wanted) == [], seed
        assert content_of(api.server) == [(wanted.content.cron, "ENABLE" if wanted.enabled else "DISABLE")], seed
        assert not api.server.killed, seed
    assert num_crashes > 300 and num_edits > 300


def test_a_run_that_another_process_makes_start_while_this_one_waits_lives():
    """In between somebody enables what is to go, and disables it again: it may still start a run."""
    api = Scripted(Server())
    converge(api, Wanted(NIGHTLY, True))
    run = api.server.fire("r-1")
    other = Turn("turns", lambda line: None, lambda: api.now, lambda seconds: None)
    later = []

    def others():
        if api.now > 60 and not later and run["state"] == "RUNNING":
            run["state"] = "SUCCEEDED"
            with other.hold():
                later.append(api.now + 20)
        if later and api.now > later[0] and len(api.server._find_recurring("r-1")["fired"]) == 1:
            api.server.fire("r-1")

    real = api.sleep
    api.sleep = lambda seconds: (real(seconds), others())
    assert converge(api, Wanted(LATER, True), wait_seconds=100) == ["r-1"]
    assert not api.server.killed


def test_whoever_was_suspended_for_long_deletes_nothing_more():
    api = Scripted(Server())
    converge(api, Wanted(NIGHTLY, True))

    def suspended(seconds):
        for _ in range(100):  # minutes, in which another process waits until nothing was heard of this one
            api.now += 5.0
            if api.now == 500.0:
                other.take()

    other = Turn("turns", lambda line: None, lambda: api.now, lambda seconds: setattr(api, "now", api.now + seconds))
    api.sleep = suspended
    with pytest.raises(LaunchError, match="at the same time"):
        converge(api, Wanted(LATER, True))
    assert [mode for _, mode in content_of(api.server)] == ["DISABLE", "ENABLE"]


class Apart(Scripted):
    """What one of several processes sees of the API: each call takes a while, in which the others go on."""

    def __init__(self, server, together, chance):
        super().__init__(server)
        self.together = together
        self.draw = chance
        self.crashed = False

    def clock(self):
        return self.together.now

    def sleep(self, seconds):
        self.together.step(seconds)

    def call(self, respond):
        self.step()
        answer = respond()
        self.step()
        enabled = [each for each in self.server.recurring if each["mode"] == "ENABLE"]
        self.enabled_too_many |= len(enabled) > 1
        return answer

    def step(self):
        if self.crashed or self.crash_at == self.num_calls:
            self.crashed = True
            raise CrashError
        self.num_calls += 1
        self.together.step(self.draw.random())


def controller(server, together, chance, ends_at):
    """Kubeflow's: it looks every 30 s, so what was disabled since may be started once more; runs end after a while."""
    seen = {}
    while together.now < ends_at:
        for each in server.recurring:
            identity = each["recurring_run_id"]
            if each["mode"] == "ENABLE":
                seen[identity] = together.now
            for run in each["fired"]:
                if chance.random() < 0.1:
                    run["state"] = "SUCCEEDED"
            if together.now - seen.get(identity, -31) < 30 and chance.random() < 0.3:
                server.fire(identity)
        together.step(5.0)


def test_several_apply_at_the_same_time(folder):
    """One after the other, whoever comes first, also where one dies: one is enabled at a time, and no run is killed."""
    num_crashes = 0
    for seed in range(500):
        chance = random.Random(seed)
        folder.files.clear()
        together, server = Together(chance), Server()
        if chance.random() < 0.7:
            create(server, NIGHTLY, "ENABLE")
        processes = [Apart(server, together, chance) for _ in range(chance.choice([2, 2, 3]))]
        crons = [(chance.randrange(3), chance.choice([0.0, 0.0, 120.0])) for _ in processes]
        current = {}
        folder.before = lambda current=current, together=together: current[together.name].step()
        for each in processes:
            each.crash_at = chance.randrange(5, 60) if chance.random() < 0.2 else None
        programs = {
            str(number): lambda each=each, cron=cron, wait=wait: converge(each, wanted_at(cron), wait)
            for number, (each, (cron, wait)) in enumerate(zip(processes, crons, strict=True))
        }
        current.update(zip(programs, processes, strict=True))
        programs["controller"] = functools.partial(controller, server, together, chance, 900.0)
        ended = together.run(programs)
        bad = [each for each in ended.values() if isinstance(each, BaseException) and not isinstance(each, CrashError)]
        assert not bad, (seed, bad)
        num_crashes += any(isinstance(each, CrashError) for each in ended.values())
        assert not server.killed and not any(each.enabled_too_many for each in processes), seed
        folder.before = lambda: None
        end_runs(server)
        alone = Scripted(server)
        assert converge(alone, wanted_at(1)) == [] and content_of(server) == [("0 0 1 * * *", "ENABLE")], seed
        assert not server.killed, seed
    assert num_crashes > 30


def test_resume_and_pause_while_others_apply(folder):
    """Somebody lets the schedule go on, or pauses it, while one or two apply it: what was said last counts."""
    for seed in range(300):
        chance = random.Random(seed)
        folder.files.clear()
        together, server, current = Together(chance), Server(), {}
        is_paused = [chance.random() < 0.8]
        create(server, NIGHTLY, "DISABLE" if is_paused[0] else "ENABLE")
        folder.before = lambda current=current, together=together: current[together.name].step()
        applying = [Apart(server, together, chance) for _ in range(chance.choice([1, 2]))]
        switching = Apart(server, together, chance)

        def wanted(hour, is_paused=is_paused):
            return Wanted(replace(NIGHTLY, cron=f"0 0 {hour} * * *"), not is_paused[0])

        def switch(is_paused=is_paused, api=switching, draw=chance):
            for _ in range(draw.randrange(25)):
                api.step()
            is_paused[0] = not is_paused[0]
            executor(api).disable() if is_paused[0] else executor(api).enable()

        hours = [chance.randrange(1, 3) for _ in applying]
        waits = [chance.choice([0.0, 120.0]) for _ in applying]
        programs = {
            str(number): lambda api=api, hour=hour, wait=wait, wanted=wanted: executor(api).converge(
                lambda: wanted(hour), wait
            )
            for number, (api, hour, wait) in enumerate(zip(applying, hours, waits, strict=True))
        }
        programs["switch"] = switch
        current.update(zip(programs, [*applying, switching], strict=True))
        programs["controller"] = functools.partial(controller, server, together, chance, 600.0)
        ended = together.run(programs)
        assert not [each for each in ended.values() if isinstance(each, BaseException)], (seed, ended)
        enabled = [mode for _, mode in content_of(server) if mode == "ENABLE"]
        assert len(enabled) == (0 if is_paused[0] else 1), (seed, is_paused, content_of(server))
        assert not server.killed, seed
        folder.before = lambda: None


def wanted_at(hour):
    return Wanted(replace(NIGHTLY, cron=f"0 0 {hour} * * *"), True)


def test_what_the_api_lists_is_read_as_it_is_written(monkeypatch, tmp_path):
    """Through kfp's own client and HTTP, with pages."""
    import kfp

    from kftrain.kubeflow.client import TOKEN_ENV, Connection

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", f"{tmp_path}/context.json")
    monkeypatch.setattr(kubeflow, "PAGE_SIZE", 2)
    with Server() as server:
        api = kubeflow.Pipelines(Connection(server.url, "", TOKEN_ENV, None))
        for content in (NIGHTLY, LATER, NIGHTLY, OTHER):
            api.create(content)
        assert [each.content.cron for each in api.list_recurring("nightly")] == [NIGHTLY.cron, LATER.cron, NIGHTLY.cron]
        assert len(api.list_recurring()) == 4
        api.enable("r-2")
        api.enable("r-99")
        assert [each.enabled for each in api.list_recurring()] == [False, True, False, False]
        (listed,) = api.list_recurring("weekly")
        assert plan(Wanted(OTHER, False), [listed]) == []
        body = server.asked("POST", "recurringruns")[0].body
        assert body["mode"] == "DISABLE" and body["no_catchup"] and body["max_concurrency"] == "2"
        assert body["pipeline_version_reference"] == {"pipeline_id": "p-1"}
        run = server.fire("r-2")
        assert api.list_live_runs("r-2") == ["nightly-1"] and api.list_live_runs("r-1") == []
        run["state"] = "SUCCEEDED"
        assert api.list_live_runs("r-2") == []
        api.disable("r-2")
        api.delete("r-2")
        api.delete("r-2")
        assert [each.id for each in api.list_recurring()] == ["r-1", "r-3", "r-4"]
        server.answers["GET", "/recurringruns"] = (429, {"error": "slow down"})
        with pytest.raises(UnavailableError, match="429"):
            api.list_recurring()
