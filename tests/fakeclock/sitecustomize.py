"""On PYTHONPATH of a crmctl process: its host clock is off by FAKE_CLOCK_OFFSET_SECONDS."""

import os
import time

_real = time.time
_offset = float(os.environ["FAKE_CLOCK_OFFSET_SECONDS"])
time.time = lambda: _real() + _offset
