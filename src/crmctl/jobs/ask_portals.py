"""Asking many portals at once, politely: no portal more than twice a second, no transaction open meanwhile.

One portal is one queue of questions. A worker takes the portal whose turn comes first, asks it one question, and
puts it back. A portal that does not answer holds a worker up once in a run, not once for each of its questions. New
tokens are stored the moment they arrive, before anything else is done with them. When a portal may be asked again,
whether it is silent, and how the OAuth server answers us are remembered from batch to batch.
"""

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol
from uuid import UUID

from crmctl.adapters.bitrix24 import Portals
from crmctl.domain.errors import ConfigurationError
from crmctl.domain.installation_reasons import Reason
from crmctl.domain.installations import Finding, unclear
from crmctl.domain.portal_answers import Failure, TokenRefused, Tokens, read_app_info, read_renewal
from crmctl.jobs.job import Run

# Seconds between two requests to one portal: a little more than a half, so that no second holds three of them.
PAUSE: Final = 0.55
# Seconds that the requests under way are waited for after a signal; the process is ended soon after.
_GRACE_AFTER_SIGNAL: Final = 3.5
_GRACE: Final = 60.0
# Seconds; how soon the main thread notices a signal or the end of the time budget.
_GLANCE: Final = 0.05
# From so many renewals on a run whose credentials are refused does not wait for the end of the batch.
_ENOUGH_TO_STOP: Final = 20
# No answer, and yet the OAuth server may have had the request.
_PERHAPS_SENT: Final = frozenset(Failure) - {Failure.UNREACHABLE, Failure.ADDRESS_REFUSED}


@dataclass(frozen=True, slots=True)
class Question:
    """A claimed installation with what its portal is asked by. `expires` is in unix seconds.

    `token_at_risk`: an earlier run may have used its refresh token up and not stored the new one. `asked_lately`:
    another run asked its portal within the last second.
    """

    installation_id: UUID
    account_id: UUID
    member_id: str
    domain_url: str
    access_token: str = field(repr=False)
    refresh_token: str = field(repr=False)
    expires: int
    token_at_risk: bool = False
    asked_lately: bool = False


class TokenStore(Protocol):
    """Where renewed tokens go."""

    def check(self) -> None:
        """Raise what would keep a token from being stored now: asked before a renewal, which uses a token up."""
        ...

    def store(self, question: Question, tokens: Tokens) -> Reason | None:
        """Replace the question's tokens in a transaction of its own.

        Returns why not: TOKEN_CHANGED where they are not the stored ones, TOKEN_LOST where the data is refused.
        """
        ...


class _Halted(Exception):  # noqa: N818  no error: the run begins nothing new
    """The run begins nothing new."""


@dataclass(slots=True)
class _Portal:
    """One portal's questions in this batch. `silent`: it did not answer, and is not asked again in this run."""

    host: str
    questions: deque[Question] = field(default_factory=deque)
    next_turn: float = 0.0
    silent: Finding | None = None


class Inquiry:
    """The questions of one run, batch by batch, and what it has learnt of the portals and the OAuth server."""

    def __init__(self, portals: Portals, store: TokenStore, *, concurrency: int, renews: bool) -> None:
        self._portals = portals
        self._store = store
        self._concurrency = concurrency
        self._renews = renews
        self._now = 0.0
        self._condition = threading.Condition()
        self._known: dict[str, _Portal] = {}
        self._ready: list[tuple[float, int, _Portal]] = []
        self._order = itertools.count()
        self._halted = False
        self._working = 0
        self._failure: BaseException | None = None
        self._renewals: Counter[bool] = Counter()
        self._unsettled: set[UUID] = set()
        self._findings: dict[UUID, Finding] = {}

    @property
    def unsettled(self) -> frozenset[UUID]:
        """Installations whose refresh token may be used up while no new one is stored: their claims must stay."""
        with self._condition:
            return frozenset(self._unsettled)

    def ask(self, questions: Iterable[Question], run: Run, now: datetime) -> dict[UUID, Finding]:
        """Ask a batch until everything is answered, the time budget is spent or a signal asks to stop.

        Returns what was found; an installation that is not in it was not asked to the end. Raises
        ConfigurationError when most of the run's renewals are refused for our own credentials: nothing may follow
        from this batch. What has stopped once, by whatever cause, is not to be called again.
        """
        self._now = now.timestamp()
        self._findings = {}
        self._ready = self._queue(questions)
        workers = [
            threading.Thread(target=self._work, name=f"portals-{number}", daemon=True)
            for number in range(min(self._concurrency, len(self._ready)))
        ]
        for worker in workers:
            worker.start()
        self._watch(run)
        grace = time.monotonic() + (_GRACE_AFTER_SIGNAL if run.stopping() else _GRACE)
        for worker in workers:
            worker.join(max(0.0, grace - time.monotonic()))
        if self._failure is not None:
            raise self._failure
        with self._condition:
            self._check_credentials()
            return dict(self._findings)

    def _queue(self, questions: Iterable[Question]) -> list[tuple[float, int, _Portal]]:
        """The portals of a batch as a heap; of the others, those are forgotten of which nothing follows any more."""
        now = time.monotonic()
        self._known = {host: known for host, known in self._known.items() if known.silent or known.next_turn > now}
        portals: dict[str, _Portal] = {}
        for question in questions:
            if (host := self._portals.host(question.domain_url)) is None:
                self._findings[question.installation_id] = unclear(Reason.ADDRESS_REFUSED)
                continue
            portal = portals[host] = self._known.setdefault(host, _Portal(host))
            portal.questions.append(question)
            if question.asked_lately:
                portal.next_turn = max(portal.next_turn, now + PAUSE)
        ready = [(portal.next_turn, next(self._order), portal) for portal in portals.values()]
        heapq.heapify(ready)
        return ready

    def _watch(self, run: Run) -> None:
        with self._condition:
            while (self._ready or self._working) and not self._halted:
                if run.stopping() or run.budget.spent:
                    self._halt()
                self._condition.wait(_GLANCE)

    def _work(self) -> None:
        while (portal := self._take()) is not None:
            try:
                question = portal.questions.popleft()
                finding = portal.silent or self._examine(portal, question)
                with self._condition:
                    self._findings[question.installation_id] = finding
            except _Halted:
                pass
            except BaseException as error:
                with self._condition:
                    self._failure = self._failure or error
                    self._halt()
            self._give_back(portal)

    def _take(self) -> _Portal | None:
        """Wait for a portal whose turn has come; None when there is nothing more to take."""
        with self._condition:
            while not self._halted:
                if not self._ready:
                    if not self._working:
                        return None
                    self._condition.wait(_GLANCE)
                    continue
                wait = self._ready[0][0] - time.monotonic()
                if wait <= 0:
                    self._working += 1
                    return heapq.heappop(self._ready)[2]
                self._condition.wait(min(wait, _GLANCE))
            return None

    def _give_back(self, portal: _Portal) -> None:
        with self._condition:
            self._working -= 1
            if portal.questions:
                heapq.heappush(self._ready, (portal.next_turn, next(self._order), portal))
            self._condition.notify_all()

    def _halt(self) -> None:
        self._halted = True
        self._condition.notify_all()

    def _turn(self, portal: _Portal) -> None:
        """Wait for the portal's turn. Raises _Halted rather than begin a request that the run has no time for."""
        while not self._halted and (wait := portal.next_turn - time.monotonic()) > 0:
            time.sleep(min(wait, _GLANCE))
        if self._halted:
            raise _Halted
        portal.next_turn = time.monotonic() + PAUSE

    def _examine(self, portal: _Portal, question: Question) -> Finding:
        if question.access_token and question.expires > self._now:
            found = self._app_info(portal, question.access_token)
            if isinstance(found, Finding):
                return found
        if not question.refresh_token:
            return unclear(Reason.TOKEN_MISSING)
        renewed = self._renew(question)
        if isinstance(renewed, Finding):
            return renewed
        found = self._app_info(portal, renewed.access_token)
        return found if isinstance(found, Finding) else unclear(Reason.TOKEN_INVALID)

    def _app_info(self, portal: _Portal, access_token: str) -> Finding | TokenRefused:
        answer = self._portals.app_info(portal.host, access_token, lambda: self._turn(portal))
        # The portal counts from a request's arrival, which may be late, but not later than its answer.
        portal.next_turn = time.monotonic() + PAUSE
        found = read_app_info(answer)
        if answer.failure in (Failure.TIMEOUT, Failure.UNREACHABLE) and isinstance(found, Finding):
            portal.silent = found
        return found

    def _renew(self, question: Question) -> Tokens | Finding:
        if not self._renews:
            return unclear(Reason.NOT_REFRESHED)
        self._store.check()
        with self._condition:
            if self._halted:
                raise _Halted
            self._unsettled.add(question.installation_id)
        answer = self._portals.renew(question.refresh_token)
        renewed = read_renewal(answer, question.member_id)
        not_stored = self._store.store(question, renewed) if isinstance(renewed, Tokens) else None
        if answer.failure not in _PERHAPS_SENT and not_stored is not Reason.TOKEN_LOST:
            with self._condition:
                self._unsettled.discard(question.installation_id)
        if answer.failure is None:
            self._count_renewal(renewed)
        if not_stored is not None:
            return unclear(not_stored)
        if isinstance(renewed, Finding) and renewed.reason is Reason.TOKEN_INVALID and question.token_at_risk:
            return unclear(Reason.TOKEN_LOST)
        return renewed

    def _count_renewal(self, renewed: Tokens | Finding) -> None:
        with self._condition:
            self._renewals[isinstance(renewed, Finding) and renewed.reason is Reason.CLIENT_REFUSED] += 1
            if self._renewals.total() >= _ENOUGH_TO_STOP:
                self._check_credentials()

    def _check_credentials(self) -> None:
        refused = self._renewals[True]
        if refused * 2 > self._renewals.total():
            raise ConfigurationError(
                f"the OAuth server refuses the application's own credentials ({refused} of"
                f" {self._renewals.total()} renewals): no installation of this batch was changed",
                hint="check CRMCTL_BITRIX24__CLIENT_ID and CRMCTL_BITRIX24__CLIENT_SECRET",
            )
