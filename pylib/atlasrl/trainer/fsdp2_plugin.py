"""What every verl process of an FSDP2 run loads beside the device's plugin: keeps Megatron out, checks the attention.

verl.workers.engine imports its Megatron engines whenever megatron-core is installed, and that pulls in torch._inductor:
about a fifth of the start-up time of every process, for nothing. verl itself treats a failing import as "not there".
"""

from __future__ import annotations

import sys

from atlasrl.trainer import fsdp2_alarms, patches  # noqa: F401  (declares the alarm)

for _engine in ("verl.workers.engine.mindspeed", "verl.workers.engine.megatron"):
    sys.modules.setdefault(_engine, None)

patches.apply("alarm-attention-scale")
