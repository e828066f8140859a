"""DAPO reinforcement learning of DeepSeek-class models with verl, as a batch job that cannot lose work."""

__version__ = "0.1.0"
