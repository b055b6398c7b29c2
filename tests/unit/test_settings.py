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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CRMCTL_KAFKA__OPTIONS", "hunter2"),
        ("CRMCTL_KAFKA__OPTIONS", '["hunter2"]'),
        ("CRMCTL_KAFKA__OPTIONS", "[" * 100_000),
        ("CRMCTL_KAFKA", "hunter2"),
        ("CRMCTL_KAFKA", '"hunter2"'),
        ("CRMCTL_DATABASE", "hunter2"),
        ("CRMCTL_DATABASE_URL", "postgresql://u:hunter2\udcff@h/d"),
        ("CRMCTL_AUTH__ISSUER", "hunter2\udcff"),
    ],
)
def test_a_value_of_the_wrong_form_names_its_variable_and_is_not_quoted(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRMCTL_KAFKA__SASL_USERNAME", "hunter2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=rf"{name} is wrong") as caught:
        settings.load()
    assert "hunter2" not in str(caught.value) + str(caught.value.hint)
    assert caught.value.__cause__ is None


def test_a_secret_file_has_the_form_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "crmctl_kafka").write_text('{"sasl_username": "crmctl", "sasl_password": "older"}')
    (tmp_path / "secrets" / "crmctl_kafka__sasl_password").write_text("hunter2")
    (tmp_path / "options").write_text('{"client.id": "crmctl"}')
    monkeypatch.setenv("CRMCTL_KAFKA__OPTIONS_FILE", str(tmp_path / "options"))
    loaded, _ = settings.load()
    assert loaded.kafka.sasl_username == "crmctl"
    assert loaded.kafka.sasl_password is not None
    assert loaded.kafka.sasl_password.get_secret_value() == "hunter2"
    assert loaded.kafka.options == {"client.id": "crmctl"}


def test_a_secret_file_that_is_no_json_beside_one_of_its_parts_is_named(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "crmctl_kafka").write_text("hunter2")
    (tmp_path / "secrets" / "crmctl_kafka__sasl_password").write_text("hunter2")
    with pytest.raises(ConfigurationError, match="CRMCTL_KAFKA is wrong") as caught:
        settings.load()
    assert "hunter2" not in str(caught.value) + str(caught.value.hint)


def test_a_secrets_directory_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secrets").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigurationError, match=r"secrets: Permission denied"):
        settings.load()


def test_the_embedded_environment_s_settings_are_checked_like_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".crmctl").mkdir()
    dev_file = tmp_path / ".crmctl" / "dev.toml"
    dev_file.write_text("[kafka]\n")
    assert settings.load_embedded().database_url is None
    dev_file.write_text('database_url = "postgresql://dev"')
    monkeypatch.setenv("CRMCTL_DATABASE_URL", "postgresql://environment")
    loaded = settings.load_embedded().database_url
    assert loaded is not None
    assert loaded.get_secret_value() == "postgresql://dev"
    monkeypatch.setenv("CRMCTL_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="CRMCTL_LOG_LEVEL is wrong"):
        settings.load_embedded()


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


@pytest.mark.parametrize("name", ["CRMCTL_CONFIG", "CRMCTL_DATABASE_URL_FILE"])
def test_a_path_that_is_no_utf8_is_shown_escaped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/absent/\udcff")
    with pytest.raises(ConfigurationError, match=r"/absent/\\xff: No such file") as caught:
        settings.load()
    assert str(caught.value).isascii()


def test_the_repr_of_the_settings_hides_the_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRMCTL_DATABASE_URL", "postgresql://u:hunter2@h/d")
    loaded, _ = settings.load()
    assert "hunter2" not in repr(loaded)
