"""Who a command says that it was typed by."""

import getpass
import os
import socket

import pytest

from crmctl.cli.whoami import operator


def test_the_operator_is_the_user_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "olga")
    assert operator() == f"olga@{socket.gethostname()}"


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no username set")], ids=["3.12", "3.13"])
def test_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert operator() == f"{os.getuid()}@{socket.gethostname()}"
