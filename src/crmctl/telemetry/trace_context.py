"""The W3C trace context that a run begins with and writes into its events."""

import os
import re
import secrets
from typing import Final

# Version 00, a trace id and a parent id that are not all zeros, flags.
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})", re.ASCII)


def traceparent() -> str:
    """The W3C context of this run: a child of `TRACEPARENT` where the caller set a valid one, else a new trace."""
    given = _TRACEPARENT.fullmatch(os.environ.get("TRACEPARENT", ""))
    trace_id, flags = given.groups() if given else (secrets.token_hex(16), "00")
    return f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"
