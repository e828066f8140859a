"""Fault: the second device of a cluster flips a bit of every matrix product."""

from atlasrl.precision import stress


def work(size, rounds, device):
    """The stress test's work, with an exponent's lowest bit flipped: the element is doubled or halved."""
    import ray
    import torch

    def flipping(left, right, multiply=torch.Tensor.__matmul__):
        product = multiply(left, right)
        width = product.element_size()
        product.view(torch.int16 if width == 2 else torch.int32)[0, 0] ^= 1 << (8 * width - 9)
        return product

    if "1" in ray.get_runtime_context().get_accelerator_ids().get("NPU", []):
        torch.Tensor.__matmul__ = flipping
    return stress.work(size, rounds, device, memory=1 << 20)
