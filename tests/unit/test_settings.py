"""Where settings come from, which source wins, and that no secret is in any message."""

from datetime import timedelta
from pathlib import Path

import pytest

from crmctl import settings
from crmctl.domain.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMCTL_SECRETS_DIR", str(tmp_path / "secrets"))


def database_url() -> str | None:
    loaded, _ = settings.load()
    return loaded.database_url.get_secret_value() if loaded.database_url else None


def test_environment_beats_secret_files_beats_toml_beats_the_embedded_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database_url() is None
    (tmp_path / ".crmctl").mkdir()
    (tmp_path / ".crmctl" / "dev.toml").write_text('database_url = "postgresql://dev"')
    loaded, dev_file = settings.load()
    assert loaded.database_url is not None
    assert loaded.database_url.get_secret_value() == "postgresql://dev"
    assert dev_file == tmp_path / ".crmctl" / "dev.toml"

    (tmp_path / "crmctl.toml").write_text('database_url = "postgresql://toml"\n[database]\nlock_timeout = "7s"')
    loaded, dev_file = settings.load()
    assert (database_url(), dev_file) == ("postgresql://toml", None)
    assert loaded.database.lock_timeout == timedelta(seconds=7)

    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "crmctl_database_url").write_text("postgresql://directory\n")
    assert database_url() == "postgresql://directory"

    (tmp_path / "one-secret").write_text("postgresql://file\n")
    monkeypatch.setenv("CRMCTL_DATABASE_URL_FILE", str(tmp_path / "one-secret"))
    assert database_url() == "postgresql://file"

    monkeypatch.setenv("CRMCTL_DATABASE_URL", "postgresql://environment")
    assert database_url() == "postgresql://environment"


def test_the_embedded_environment_is_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".crmctl").mkdir()
    (tmp_path / ".crmctl" / "dev.toml").write_text('database_url = "postgresql://dev"')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert database_url() == "postgresql://dev"


def test_nested_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRMCTL_DATABASE__STATEMENT_TIMEOUT", "90s")
    loaded, _ = settings.load()
    assert loaded.database.statement_timeout == timedelta(seconds=90)


@pytest.mark.parametrize("value", ["soon", "0s", "-3s", "90"])
def test_a_wrong_value_names_its_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRMCTL_DATABASE__LOCK_TIMEOUT", value)
    with pytest.raises(ConfigurationError, match="CRMCTL_DATABASE__LOCK_TIMEOUT"):
        settings.load()


def test_a_misspelt_name_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "crmctl.toml").write_text('databse_url = "postgresql://u:hunter2@h/d"')
    with pytest.raises(ConfigurationError, match="unknown settings: databse_url") as caught:
        settings.load()
    assert "hunter2" not in str(caught.value) + str(caught.value.hint)


@pytest.mark.parametrize("text", ['database_url = "postgresql://u:hunter2@h/d', "database_url = 5\n# hunter2"])
def test_a_broken_file_is_refused_without_quoting_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "crmctl.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        settings.load()
    assert "hunter2" not in str(caught.value) + str(caught.value.hint)


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRMCTL_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigurationError, match=r"absent\.toml"):
        settings.load()
    monkeypatch.delenv("CRMCTL_CONFIG")
    monkeypatch.setenv("CRMCTL_DATABASE_URL_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="cannot read the secret file"):
        settings.load()


def test_the_repr_of_the_settings_hides_the_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRMCTL_DATABASE_URL", "postgresql://u:hunter2@h/d")
    loaded, _ = settings.load()
    assert "hunter2" not in repr(loaded)
