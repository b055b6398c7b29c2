"""The policy of the sweep: every verdict, action and age; and what cannot be expressed."""

import itertools
from datetime import timedelta
from uuid import UUID

import pytest

from crmctl.domain.installation_reasons import Reason, explain
from crmctl.domain.installations import (
    BLOCK,
    CASCADE,
    INSTALLED,
    NOT_INSTALLED,
    NOT_VERIFIED,
    UNFINISHED,
    Action,
    Aggregate,
    Finding,
    Pair,
    Path,
    Policy,
    Status,
    Transition,
    Verdict,
    anomaly,
    backoff,
    decide,
    unclear,
)

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def pair(**changes: object) -> Pair:
    values: dict[str, object] = {
        "installation_id": UUID(int=1),
        "account_id": UUID(int=2),
        "installation_status": "new",
        "account_status": "new",
        "member_id": "member",
        "is_master": True,
        "token_set": False,
        "live_installations": 1,
        "live_masters": 1,
        "age": 2 * HOUR,
    }
    return Pair(**(values | changes))  # type: ignore[arg-type]


# What the library's entities allow, written down here a second time, from their guards.
INSTALLATION_ALLOWS = {
    ("new", "blocked"),
    ("active", "blocked"),
    ("active", "deleted"),
    ("blocked", "deleted"),
}
ACCOUNT_ALLOWS = {
    ("new", "blocked"),
    ("active", "blocked"),
    ("blocked", "blocked"),
    ("new", "deleted"),
    ("active", "deleted"),
}


@pytest.mark.parametrize(
    ("aggregate", "allowed"),
    [(Aggregate.INSTALLATION, INSTALLATION_ALLOWS), (Aggregate.ACCOUNT, ACCOUNT_ALLOWS)],
)
def test_a_step_that_the_library_refuses_cannot_be_expressed(
    aggregate: Aggregate, allowed: set[tuple[str, str]]
) -> None:
    for start, end in itertools.product(Status, Status):
        if (start.value, end.value) in allowed:
            assert Path(aggregate, (start, end)).end is end
        else:
            with pytest.raises(ValueError, match="does not go from"):
                Path(aggregate, (start, end))


def test_nothing_leads_to_active() -> None:
    for aggregate, start in itertools.product(Aggregate, Status):
        with pytest.raises(ValueError, match="does not go from"):
            Path(aggregate, (start, Status.ACTIVE))


def test_a_new_installation_does_not_go_to_deleted_without_being_blocked() -> None:
    with pytest.raises(ValueError, match="does not go from new to deleted"):
        Path(Aggregate.INSTALLATION, (Status.NEW, Status.DELETED))
    assert CASCADE.installation.statuses == (Status.NEW, Status.BLOCKED, Status.DELETED)
    assert CASCADE.account.statuses == (Status.NEW, Status.DELETED)


def test_one_row_of_a_pair_cannot_move_alone() -> None:
    with pytest.raises(ValueError, match="same status"):
        Transition(BLOCK.installation, CASCADE.account)
    with pytest.raises(ValueError, match="same status"):
        Transition(CASCADE.installation, BLOCK.account)
    with pytest.raises(ValueError, match="one path for each"):
        Transition(BLOCK.installation, BLOCK.installation)
    with pytest.raises(ValueError, match="beginning and an end"):
        Path(Aggregate.INSTALLATION, (Status.NEW,))


def test_only_a_new_pair_is_swept() -> None:
    active = Path(Aggregate.INSTALLATION, (Status.ACTIVE, Status.BLOCKED))
    with pytest.raises(ValueError, match="both rows are new"):
        Transition(active, BLOCK.account)


FINDINGS = {
    Verdict.NOT_VERIFIED: NOT_VERIFIED,
    Verdict.NOT_INSTALLED: NOT_INSTALLED,
    Verdict.INSTALLED: INSTALLED,
    Verdict.UNFINISHED: UNFINISHED,
    Verdict.UNCLEAR: unclear(Reason.TIMEOUT),
}
AGES = (2 * HOUR, 23 * HOUR, 24 * HOUR, 29 * DAY, 30 * DAY, 400 * DAY)


def expected(verdict: Verdict, action: Action, age: timedelta) -> str:
    """DESIGN's table in the words of this test."""
    if action is Action.ALERT:
        return "left"
    if verdict is Verdict.NOT_VERIFIED:
        return "deleted" if action is Action.DELETE else "blocked"
    if verdict is Verdict.NOT_INSTALLED:
        return "deleted"
    if verdict is Verdict.INSTALLED:
        return "blocked"
    if verdict is Verdict.UNFINISHED:
        return "blocked" if age >= DAY else "left"
    return "blocked" if age >= 30 * DAY else "left"


@pytest.mark.parametrize("verdict", FINDINGS)
def test_every_verdict_with_every_action_at_every_age(verdict: Verdict) -> None:
    for action, age, attempts in itertools.product(Action, AGES, (1, 2, 3, 50)):
        decision = decide(pair(age=age), FINDINGS[verdict], Policy(action), attempts=attempts)
        assert decision.outcome == expected(verdict, action, age), (action, age, attempts)
        assert (decision.next_check_in is None) == (decision.outcome != "left")
        assert decision.next_check_in is None or timedelta(0) < decision.next_check_in <= DAY
        if decision.transition is not None:
            assert decision.transition in (BLOCK, CASCADE)
            assert not decision.alert


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"account_status": None, "member_id": None, "is_master": None}, Reason.ACCOUNT_MISSING),
        ({"account_status": "active"}, Reason.ACCOUNT_NOT_NEW),
        ({"account_status": "blocked"}, Reason.ACCOUNT_NOT_NEW),
        ({"account_status": "deleted"}, Reason.ACCOUNT_NOT_NEW),
        ({"account_status": "needReinstall"}, Reason.ACCOUNT_NOT_NEW),
        ({"token_set": True}, Reason.TOKEN_ALREADY_SET),
        ({"is_master": None}, Reason.ACCOUNT_NOT_MASTER),
        ({"is_master": False}, Reason.ACCOUNT_NOT_MASTER),
        ({"member_id": " "}, Reason.MEMBER_MISSING),
        ({"live_installations": 2}, Reason.TWO_LIVE_INSTALLATIONS),
        ({"live_masters": 2}, Reason.TWO_LIVE_MASTERS),
    ],
)
def test_an_anomaly_is_left_and_alerted_whatever_was_found(changes: dict[str, object], reason: Reason) -> None:
    odd = pair(age=400 * DAY, **changes)
    assert anomaly(odd) == Finding(Verdict.ANOMALY, reason)
    for finding, action in itertools.product(FINDINGS.values(), Action):
        decision = decide(odd, finding, Policy(action), attempts=99)
        assert (decision.outcome, decision.alert, decision.finding.reason) == ("left", True, reason)


def test_a_pair_in_order_is_no_anomaly() -> None:
    assert anomaly(pair()) is None


@pytest.mark.parametrize("changes", [{"age": HOUR - timedelta(seconds=1)}, {"installation_status": "active"}])
def test_what_is_not_stale_is_not_decided(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not stale"):
        decide(pair(**changes), NOT_INSTALLED, Policy(), attempts=1)


def test_unclear_and_anomalies_alert_and_an_open_wizard_does_not() -> None:
    assert decide(pair(), unclear(Reason.TIMEOUT), Policy(), attempts=1).alert
    assert not decide(pair(), UNFINISHED, Policy(), attempts=1).alert
    assert decide(pair(), NOT_VERIFIED, Policy(Action.ALERT), attempts=1).alert
    assert decide(pair(age=2 * DAY), UNFINISHED, Policy(Action.ALERT), attempts=1).alert


@pytest.mark.parametrize("reason", [Reason.CLIENT_REFUSED, Reason.TOKEN_LOST])
def test_what_we_brought_about_ourselves_never_ends_an_install(reason: Reason) -> None:
    for age, action in itertools.product(AGES, Action):
        decision = decide(pair(age=age), unclear(reason), Policy(action), attempts=8)
        assert (decision.outcome, decision.alert) == ("left", True)
        assert decision.next_check_in is not None
        assert timedelta(0) < decision.next_check_in <= DAY
    assert decide(pair(age=400 * DAY), NOT_VERIFIED, Policy(), attempts=8).outcome == "blocked"


def test_the_pause_doubles_up_to_a_day() -> None:
    minutes = [backoff(attempts) // timedelta(minutes=1) for attempts in (1, 2, 3, 4, 7, 8, 1000)]
    assert minutes == [15, 30, 60, 120, 960, 1440, 1440]


def test_the_next_look_is_not_later_than_the_end_of_the_wait() -> None:
    soon = decide(pair(age=DAY - timedelta(minutes=1)), UNFINISHED, Policy(), attempts=1)
    assert soon.next_check_in == timedelta(minutes=1)
    late = decide(pair(age=30 * DAY - HOUR), unclear(Reason.TIMEOUT), Policy(), attempts=20)
    assert late.next_check_in == HOUR


def test_the_ttl_that_decided_is_named() -> None:
    policy = Policy(ttl=HOUR, unfinished_ttl=DAY, unclear_ttl=3 * DAY)
    ttls = {verdict: decide(pair(), finding, policy, attempts=1).ttl for verdict, finding in FINDINGS.items()}
    assert ttls == {
        Verdict.NOT_VERIFIED: HOUR,
        Verdict.NOT_INSTALLED: HOUR,
        Verdict.INSTALLED: HOUR,
        Verdict.UNFINISHED: DAY,
        Verdict.UNCLEAR: 3 * DAY,
    }


def test_every_reason_has_its_sentence() -> None:
    assert all(explain(reason) for reason in Reason)
