"""A cheap check inside every FSDP2 worker at start: the running attention scales as config.json says. See `alarms`."""

from __future__ import annotations

from atlasrl.errors import Fault
from atlasrl.precision import structure
from atlasrl.trainer.patches import patch


@patch(
    id="alarm-attention-scale",
    reason="a wrong softmax scale bends the curve for weeks without an error",
    upstream="none: a check of ours",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.workers.actor.dp_actor:DataParallelPPOActor.__init__",
    expects="self.actor_module = actor_module",
)
def check_at_start(original):
    def __init__(self, config, actor_module, *args, **kwargs):
        original(self, config, actor_module, *args, **kwargs)
        check_attention_scale(actor_module)

    return __init__


def check_attention_scale(model) -> None:
    """Raises Fault when an attention applies another scale than the model's configuration says."""
    wrong = [verdict for verdict in structure.check(model, model.config.to_dict()) if not verdict.ok]
    if wrong:
        raise Fault(
            f"the softmax scale of {len(wrong)} attention layers is wrong, first {wrong[0]}; log-probabilities would "
            "differ from the rollout engine's: look for a patch or a kernel that replaces this attention"
        )
