"""An error of a connection names the setting that it came from, and quotes nothing of the connection string."""

import pytest

from crmctl.adapters.postgres import Dsn, connect
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import CrmctlError
from crmctl.settings import DatabaseSettings


@pytest.mark.parametrize("database", DatabaseName)
@pytest.mark.parametrize(
    "text",
    ["postgresql://u:hunter2@[h/d", "postgresql://u:pass@hunter2@h/d", " ", "postgresql://u:hunter2@127.0.0.1:1/d"],
    ids=["no DSN", "an @ in the password", "empty", "a server that is away"],
)
def test_a_wrong_connection_string(text: str, database: DatabaseName) -> None:
    with pytest.raises(CrmctlError) as caught:
        connect(Dsn(text, database.setting), DatabaseSettings(), application_name="test")
    told = f"{caught.value.message} {caught.value.hint}"
    assert [name.setting for name in DatabaseName if name.setting in told.split()] == [database.setting]
    assert "hunter2" not in told
