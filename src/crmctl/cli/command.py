"""One command line: its settings, its signals, its database, its output, its errors and its exit code."""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn

import psycopg
import typer

from crmctl import settings as settings_module
from crmctl.adapters import postgres
from crmctl.adapters.postgres import Database, Dsn
from crmctl.cli import output
from crmctl.cli.exits import Exit, exit_code
from crmctl.cli.signals import Interrupts
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import ConfigurationError, CrmctlError, InterruptedRunError, UsageError
from crmctl.domain.grants import Kind
from crmctl.jobs import roles
from crmctl.settings import Settings
from crmctl.telemetry import logs

# Guards of the look at what the role may do, after a permission was denied.
_GRANTS_GUARDS: Final = dict.fromkeys(("connect_timeout", "statement_timeout", "lock_timeout"), timedelta(seconds=2))


class Command:
    """One command line from its start to its exit code, and the place where every failure is explained."""

    def __init__(self, form: output.Format) -> None:
        self._format = form
        self._started = time.monotonic()
        self._settings: Settings | None = None
        self._connections: list[Database] = []
        self._which = DatabaseName.MAIN
        self.interrupts = Interrupts()
        self.log: logs.Log = logs.configure()
        self.committed: Mapping[str, object] | None = None
        # What this command is about: in its error document, whatever fails.
        self.subject: dict[str, str | int | None] = {}
        # Whose grants it needs, so that those that are missing can be named; None: more than any of our roles has.
        self.kind: Kind | None = Kind.READONLY
        self._explained: tuple[BaseException, BaseException] | None = None

    def __enter__(self) -> "Command":
        self.interrupts.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        self.interrupts.settle()
        for connection in self._connections:
            connection.close()
        if error is not None and not isinstance(error, typer.Exit):
            self._fail(error)

    @property
    def elapsed_ms(self) -> int:
        """Milliseconds since the command started."""
        return round((time.monotonic() - self._started) * 1000)

    @property
    def settings(self) -> Settings:
        """The settings, read on first use."""
        if self._settings is None:
            self._settings, dev_file = settings_module.load()
            self.log = logs.configure(level=self._settings.log_level, form=self._settings.log_format)
            if dev_file is not None:
                self.log.warning("using the embedded development environment", file=str(dev_file))
        return self._settings

    def bind(self, **values: object) -> None:
        """Add fields to every further log line of this command."""
        _ = self.settings
        self.log = self.log.bind(**{name: value for name, value in values.items() if value is not None})

    def notice(self, message: str, **fields: object) -> None:
        """Tell the person something that they need, however quiet the log is set."""
        logs.configure(level="warning", form=self.settings.log_format).warning(message, **fields)

    @property
    def databases(self) -> tuple[DatabaseName, ...]:
        """The databases that are configured: one, or two if bitrix24-php-lib's tables are in another."""
        other = self.settings.installations_database_url
        return (DatabaseName.MAIN,) if other in (None, self.settings.database_url) else tuple(DatabaseName)

    def dsn(self, which: DatabaseName | None = None, *, settings: Settings | None = None) -> Dsn:
        """Where a database is; by default the one in use. Raises ConfigurationError where none is configured."""
        settings = settings or self.settings
        which = which or self._which
        if which is DatabaseName.INSTALLATIONS and settings.installations_database_url is not None:
            return Dsn(settings.installations_database_url.get_secret_value(), which.setting)
        url = settings.database_url
        if url is None:
            raise ConfigurationError(
                "no database is configured",
                hint="set CRMCTL_DATABASE_URL, or start a local one with: crmctl dev up",
            )
        return Dsn(url.get_secret_value())

    def use_database(self, which: DatabaseName) -> None:
        """From here on work on this database."""
        self._which = which

    def use_installations_database(self) -> None:
        """From here on work on the database of bitrix24-php-lib's tables."""
        self.use_database(DatabaseName.INSTALLATIONS)

    def database(self, application_name: str, **guards: timedelta) -> Database:
        """A connection to the database in use, with other guards than the configured ones where given."""
        limits = self.settings.database.model_copy(update=guards)
        connection = Database(self.dsn(), limits, application_name=application_name)
        self._connections.append(connection)
        return connection

    def report_line(self, document: Mapping[str, Any]) -> None:
        """Print one batch of a run that goes on: one line."""
        if self._format is output.Format.JSON:
            output.write_json(document, one_line=True)
        else:
            output.write("  ".join(f"{name} {output.cell(value)}" for name, value in document.items()) + "\n")

    def report(self, document: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]) -> None:
        """Print the result; from here on a signal can no longer change it."""
        self.interrupts.settle()
        if self._format is output.Format.JSON:
            output.write_json(document)
        else:
            output.write(render(document))

    def report_rows(self, name: str, rows: output.Rows, rest: Mapping[str, Any]) -> None:
        """Print a listing of any length, with the document's other fields."""
        self.interrupts.settle()
        rows.write(self._format, name, rest)

    def confirm(self, question: str) -> None:
        """Ask on the terminal before something that cannot be taken back. Raises UsageError without an answer."""
        if not sys.stdin or not sys.stdin.isatty():
            raise UsageError("this asks before it acts, and there is no terminal to ask on", hint="add --yes")
        if not typer.confirm(question, err=True):
            raise UsageError("nothing was changed")

    def exit(self, code: int) -> NoReturn:
        """Leave with a code."""
        raise typer.Exit(int(code))

    def explain(self, error: BaseException) -> BaseException:
        """Turn whatever ended the command into a CrmctlError, or return it as it is where it can only be a bug.

        Once a signal has arrived, what follows from it (a lost connection, a failed rollback) is that signal.
        """
        if (signum := self.interrupts.pending) is not None:
            name = signal.Signals(signum).name
            return InterruptedRunError(f"{name} arrived: what was not committed was rolled back", signum=signum)
        if self._explained is not None and self._explained[0] is error:
            return self._explained[1]
        if isinstance(error, psycopg.errors.InsufficientPrivilege) and self.kind is not None:
            found = self._name_missing_grants(error, self.kind)
        else:
            found = postgres.translate(error) if isinstance(error, psycopg.Error) else error
        if (
            isinstance(found, CrmctlError)
            and found.hint
            and self._settings is not None
            and self._which in self.databases
        ):
            found.hint = self._which.aim(found.hint)
        self._explained = error, found
        return found

    def _name_missing_grants(self, error: psycopg.Error, kind: Kind) -> BaseException:
        """Say which grants of this command's kind of work the role lacks; PostgreSQL names the table only."""
        limits = self.settings.database.model_copy(update=_GRANTS_GUARDS)
        try:
            with postgres.connect(self.dsn(), limits, application_name="crmctl grants") as connection:
                tx = postgres.Transaction(connection, datetime.now(UTC))
                missing = roles.lacking(tx, kind)
                role = connection.info.user
        except (psycopg.Error, CrmctlError):
            missing = []
        if not missing:
            return postgres.translate(error)
        return roles.missing_error(role, f"{limits.role_prefix}{kind}", missing, postgres.describe(error))

    def _fail(self, error: BaseException) -> NoReturn:
        """Explain a failure on stderr, as the JSON document on stdout where that was asked for, and exit."""
        if isinstance(error, output.OutputError):
            self.log.error("the result could not be written; what was committed stays", reason=str(error))
            raise typer.Exit(int(Exit.OUTPUT_FAILED))
        failure = self.explain(error)
        code = exit_code(failure)
        if not isinstance(failure, CrmctlError):
            frames = [f"{f.name} ({f.filename}:{f.lineno})" for f in traceback.extract_tb(error.__traceback__)]
            self.log.error("unexpected error: this is a bug", error_type=type(error).__name__, frames=frames)
            message = postgres.describe(error) if isinstance(error, psycopg.Error) else type(error).__name__
            failure = CrmctlError(f"unexpected error ({message})", hint="report it with the log line above")
        self.log.error("run failed", error_code=failure.code, reason=failure.message, hint=failure.hint)
        if self._format is output.Format.JSON:
            body: dict[str, object] = {
                "code": failure.code,
                "message": failure.message,
                "hint": failure.hint,
                "exit_code": code,
            }
            if failure.http_status is not None:
                body["http_status"] = failure.http_status
            document: dict[str, object] = {"error": {**body, **self.subject, **failure.details}}
            if self.committed is not None:
                document["committed"] = self.committed
            try:
                output.write_json(document)
            except output.OutputError as unwritten:
                self.log.error("the error document could not be written", reason=str(unwritten))
        raise typer.Exit(code)
