"""The gradient self-test: does a layout compute the gradients and updates that the mathematics says?

One recorded batch is trained for two optimizer steps by verl's own workers in a local Ray cluster, driven through
verl's own dispatch with the overrides of a real run, and by an independent single-process reference. Every gradient
and every updated parameter, merged over the workers and named as in the Hugging Face checkpoint, must agree on every
worker.

A rising reward proves nothing: each fault in docs/upstream.md left the reward rising.
"""
