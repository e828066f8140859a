"""Tools for safetensors checkpoints: cast, verify, repair, diff, shrink, prune.

Works alone: click and rich for everything; numpy and numba for the passes over data.
"""
