"""Compose settings with the verl on this process's path and make its dataclasses of them; print what came out.

python compose_verl.py CONFIG_NAME <overrides.json
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(sys.argv[1], overrides=json.load(sys.stdin))
    OmegaConf.resolve(config)
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim)
    print(
        json.dumps(
            {
                "verl": (Path(verl.__file__).parent / "version" / "version").read_text().strip(),
                "actor": type(actor).__name__,
                "clip": [actor.clip_ratio_low, actor.clip_ratio_high],
                "optimizer": type(model).__name__,
                "samples": rollout.n,
                "expert": rollout.expert_parallel_size,
            }
        )
    )


if __name__ == "__main__":
    main()
