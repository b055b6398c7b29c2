"""The sweep's first two kinds of transactions: the claim, and the token store (jobs/sweep_installations.py)."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from crmctl.adapters import postgres
from crmctl.adapters.bitrix24 import Portals
from crmctl.adapters.postgres import Database, Transaction, array_literal
from crmctl.domain.errors import CrmctlError, TryAgainError, UnavailableError
from crmctl.domain.installation_reasons import Reason
from crmctl.domain.installations import Finding, Policy, anomaly
from crmctl.domain.portal_answers import Tokens
from crmctl.jobs import sweep_queue
from crmctl.jobs.ask_portals import Inquiry, Question
from crmctl.jobs.job import Run
from crmctl.jobs.sweep_writing import UPDATE_SUPPRESSED, Failed
from crmctl.settings import Bitrix24Settings

T = TypeVar("T")
_ATTEMPTS: Final = 5
# Of the advisory lock under which claims are made; the number only has to be the same in every crmctl.
_TURN: Final = 0x63726D73776570
# Seconds that a renewed token is tried to be stored for: it is worth more than the run's punctuality.
_STORE_PATIENCE: Final = 20.0
# How much longer than the run's time budget and its last requests a lease lasts.
LEASE_MARGIN: Final = timedelta(seconds=60)
# What the question whether tokens could be stored is asked with.
_NO_TOKENS: Final = Tokens("", "", None, 0)


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch is about, and what was found; None: its rows are in disorder, so nobody was asked.

    `refused`: the renewed tokens that PostgreSQL did not take, and what it said.
    """

    claimed: frozenset[UUID]
    findings: Mapping[UUID, Finding | None]
    refused: tuple[Failed, ...] = ()


class Claims:
    """Claims one run's installations and asks their portals, on connections of its own.

    `lease`: how long a claim lasts.
    """

    def __init__(
        self, settings: Bitrix24Settings, portals: Portals, connect: Callable[[], Database], lease: timedelta
    ) -> None:
        self._settings = settings
        self._portals = portals
        self._database = connect()
        self._store_database = connect()
        self._lease = lease
        self._claimed: tuple[str, UUID] | None = None
        self._inquiry: Inquiry | None = None
        self._refused: list[Failed] = []

    @property
    def unsettled(self) -> frozenset[UUID]:
        """Installations whose claims must stay: their tokens may be used up (`Inquiry.unsettled`)."""
        return self._inquiry.unsettled if self._inquiry is not None else frozenset()

    def close(self) -> None:
        """Close both connections."""
        self._database.close()
        self._store_database.close()

    def find(
        self,
        run: Run,
        *,
        policy: Policy,
        ids: Sequence[UUID],
        passed: frozenset[UUID],
        limit: int,
        dry_run: bool,
    ) -> Found:
        """Claim up to `limit` due installations and ask about them; a dry run claims nothing and renews no token.

        Raises ConfigurationError when most renewals are refused for our own credentials. After a failure, here or
        later, `give_back` is the caller's to call.
        """
        params = {
            **sweep_queue.due_params(self._settings, policy, ids, passed, limit),
            "lease": self._lease,
            "run_id": run.id,
        }

        def take(tx: Transaction) -> tuple[dict[str, str], list[Any], set[UUID], Any]:
            statements = sweep_queue.statements(tx, self._settings)
            if not dry_run:
                tx.execute(statements["take_turn"], {"lock": _TURN})
            rows = tx.all(statements["look" if dry_run else "claim"], params)
            taken = {**params, "ids": array_literal([row["installation_id"] for row in rows])}
            pairs = [sweep_queue.read_pair(row) for row in tx.all(statements["read_pairs"], taken)]
            healthy = {pair.installation_id for pair in pairs if anomaly(pair) is None}
            return statements, rows, healthy, tx.now

        statements, rows, healthy, now = self._transaction(take, commit=not dry_run)
        if not dry_run:
            self._claimed = statements["give_back"], run.id
        findings: dict[UUID, Finding | None] = {
            row["installation_id"]: None for row in rows if row["installation_id"] not in healthy
        }
        questions = [Question(**row) for row in rows if row["installation_id"] in healthy]
        if self._inquiry is None:
            store = _Store(self._store_database, statements, self._settings.php_timezone, self._refused.append)
            self._inquiry = Inquiry(self._portals, store, concurrency=self._settings.concurrency, renews=not dry_run)
        findings |= self._inquiry.ask(questions, run, now)
        refused = tuple(self._refused)
        self._refused.clear()
        return Found(frozenset(row["installation_id"] for row in rows), findings, refused)

    def give_back(self) -> None:
        """Give up what the run has claimed and not applied, unless its token may be used up.

        Best effort: a lease that is not given back runs out.
        """
        if self._claimed is None:
            return
        statement, run_id = self._claimed
        try:
            params = {"run_id": run_id, "unsettled": array_literal(list(self.unsettled))}
            self._transaction(lambda tx: tx.execute(statement, params), commit=True)
        except (psycopg.Error, CrmctlError):
            return

    def _transaction(self, work: Callable[[Transaction], T], *, commit: bool) -> T:
        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, psycopg.Error) and error.sqlstate in postgres.RETRYABLE
            ),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            reraise=True,
        )

        def attempt() -> T:
            try:
                result = work(self._database.begin())
                if commit:
                    self._database.commit()
                return result
            finally:
                self._database.rollback()

        return retrying(attempt)


class _Store:
    """Stores renewed tokens, one at a time, on one connection that several threads take turns at.

    `refuse` is told what PostgreSQL refused.
    """

    def __init__(
        self, database: Database, statements: Mapping[str, str], zone: str, refuse: Callable[[Failed], None]
    ) -> None:
        self._database = database
        self._statements = statements
        self._zone = zone
        self._refuse = refuse
        self._turn = threading.Lock()
        self._permitted = False

    def check(self) -> None:
        """Begin a transaction and end it: raises where there is no connection to be had.

        The first time, PostgreSQL is also asked whether it would run the statement for this role: to explain an
        update takes the privileges of that update, column by column.
        """
        with self._turn:
            try:
                tx = self._database.begin()
                if not self._permitted:
                    tx.execute(f"explain {self._statements['store_token']}", self._params(UUID(int=0), "", _NO_TOKENS))
                    self._permitted = True
            finally:
                self._database.rollback()

    def store(self, question: Question, tokens: Tokens) -> Reason | None:
        """Replace the tokens if the stored refresh token is the one that was used; returns why not.

        Tries for 20 s what may succeed later: the token that it replaces is used up.
        """
        params = self._params(question.account_id, question.refresh_token, tokens)

        def attempt() -> Reason | None:
            try:
                tx = self._database.begin()
                if tx.first(self._statements["store_token"], params) is not None:
                    self._database.commit()
                    return None
                if tx.first(self._statements["same_token"], params) is None:
                    self._database.rollback()
                    return Reason.TOKEN_CHANGED
            except psycopg.Error as error:
                self._database.close()
                if not postgres.is_data_error(error):
                    raise
                return self._lose(question, postgres.describe(error))
            except BaseException:
                self._database.close()
                raise
            self._database.rollback()
            return self._lose(question, UPDATE_SUPPRESSED)

        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_delay(_STORE_PATIENCE),
            reraise=True,
            wait=wait_random_exponential(multiplier=0.1, max=2),
        )
        with self._turn:
            return retrying(attempt)

    def _lose(self, question: Question, reason: str) -> Reason:
        self._refuse(Failed(question.installation_id, reason))
        return Reason.TOKEN_LOST

    def _params(self, account_id: UUID, used: str, tokens: Tokens) -> dict[str, object]:
        return {
            "account_id": account_id,
            "old_refresh_token": used,
            "access_token": tokens.access_token,
            "refresh_token": tokens.refresh_token,
            "expires": tokens.expires,
            "expires_in": tokens.expires_in,
            "zone": self._zone,
        }


def _may_pass(error: BaseException) -> bool:
    failure = postgres.translate(error) if isinstance(error, psycopg.Error) else error
    return isinstance(failure, UnavailableError | TryAgainError)
