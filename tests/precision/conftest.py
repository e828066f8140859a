"""The precision tests use the small model and prompts of the trainer tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
