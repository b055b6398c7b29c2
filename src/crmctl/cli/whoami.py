"""Who types a command, for what is kept with it: the reason of a pause, the fate of a dead letter."""

import getpass
import os
import socket


def operator() -> str:
    """The user of the operating system and the host, as `user@host`; a container's numeric user has no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
