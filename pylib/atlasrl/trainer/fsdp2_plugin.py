"""What every verl process of an FSDP2 run loads beside the device's plugin: it keeps Megatron out of the process.

verl.workers.engine imports its Megatron engines whenever megatron-core is installed, and that pulls in torch._inductor:
about a fifth of the start-up time of every process, for nothing. verl itself treats a failing import as "not there".
"""

from __future__ import annotations

import sys

for _engine in ("verl.workers.engine.mindspeed", "verl.workers.engine.megatron"):
    sys.modules.setdefault(_engine, None)
