"""The precision tests use the small model and prompts of the trainer tests, and plant the faults of `planted`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "trainer"), str(Path(__file__).parent / "planted")]
