"""Tools for safetensors checkpoints: cast, verify, repair, diff, shrink, prune.

Works alone: numpy, click and rich for everything; numba for the passes over data; torch only to prove a cast.
"""
