"""What every number of the memory model is: formula, source and reason. Printed by `bin/memory --why`."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    formula: str
    source: str
    why: str


PHASES = {
    "reshard": "training weights flow into the rollout engine; both copies are on the device",
    "rollout": "answers are generated; the engine fills its share of the device with the KV cache",
    "log_prob": "the policy scores its own answers: forward only, entropy computed",
    "reference": "the frozen reference model scores the answers",
    "update": "forward and backward of the micro-batches; verl loads the optimizer before the first of them",
    "step": "the optimizer changes the weights",
}

TERMS = {
    "weights": Explanation(
        "2 B x parameters of the stage on this rank",
        "Megatron-core 0.12.1 theoretical_memory_usage; verl offload_megatron_model_to_cpu",
        "bf16 copy that forward and backward use",
    ),
    "gradients": Explanation(
        "4 B x parameters of the stage on this rank",
        "verl offload_megatron_model_to_cpu: 'fp32 grad chunked in model parallel group'",
        "main gradients accumulate in fp32 and are not divided over data-parallel ranks",
    ),
    "optimizer": Explanation(
        "12 B x (dense / (DP x CP) + expert / EDP) x (1 - optimizer_on_host)",
        "Megatron-core distributed optimizer: fp32 master, two fp32 moments",
        "verl's update_actor loads it before forward and backward, so it stands beside the activations",
    ),
    "activations": Explanation(
        "tokens / CP x kept bytes a token x micro-batches in flight",
        "arXiv 2104.04473 (schedules), arXiv 2205.05198 (sequence parallelism, recomputation)",
        "what the backward pass of the micro-batches in flight still needs",
    ),
    "recomputed": Explanation(
        "tokens / CP x bytes a token of the layers recomputed together",
        "Megatron-core 0.12.1 recompute_granularity, recompute_method",
        "recomputation does not remove a layer's activations, it keeps them for one layer at a time",
    ),
    "one layer": Explanation(
        "tokens / CP x bytes a token of the largest layer",
        "forward passes without a graph free each layer after the next has its input",
        "scoring keeps no graph",
    ),
    "logits": Explanation(
        "tokens / CP x V / TP x bytes a logit (6 update, 16 with entropy)",
        "Megatron-core 0.12.1 Float16Module (bf16 logits + fp32 copy); verl 0.7.0 megatron_actor.logits_processor "
        "(clone), _VocabParallelEntropy (softmax and product), cross entropy in place",
        "only the last stage has them; scoring always computes the entropy",
    ),
    "reference weights": Explanation(
        "2 B x parameters of the stage on this rank",
        "verl 0.7.0 megatron_workers, ref.megatron.param_offload",
        "a second, frozen model when the loss or the reward holds a KL term",
    ),
    "gathered layer": Explanation(
        "bytes of the two largest neighbouring FSDP units, unsharded in compute_dtype",
        "PyTorch FSDP2: the unit in use and the one prefetched",
        "FSDP2 gathers whole layers on every rank",
    ),
    "export buffer": Explanation(
        "2 x the largest tensor of the checkpoint, bf16",
        "mbridge export_weights: the gathered shards and their concatenation",
        "weights are exported one whole tensor at a time",
    ),
    "rollout weights": Explanation(
        "2 B x rollout parameters on this rank",
        "vLLM: dense over TP, whole experts over EP, MLA down-projections and router replicated",
        "the engine's own copy",
    ),
    "absorbed copies": Explanation(
        "2 B x layers x kv_lora_rank x heads x (nope + value) / TP",
        "vLLM-Ascend MLA process_weights_after_loading: W_UK_T and W_UV are contiguous copies",
        "absorbed attention needs kv_b_proj in another layout; the original stays",
    ),
    "rollout activations": Explanation(
        "an allowance, 2 GiB",
        "guess; vLLM prints the measured peak of its profile run",
        "largest forward pass of the engine",
    ),
    "KV cache": Explanation(
        "memory_fraction x device - weights - activations",
        "vLLM gpu_memory_utilization",
        "vLLM takes all of its share, whatever the batch needs",
    ),
    "communication": Explanation(
        "process groups x 2 x HCCL_BUFFSIZE",
        "Huawei's HCCL documentation: two buffers a communicator, 200 MB by default; groups of Megatron-core and vLLM",
        "outside of what torch_npu reports as allocated or reserved",
    ),
    "runtime": Explanation(
        "an allowance, 2 GiB",
        "guess; measure APP minus PTA of npu_module_mem.csv with `bin/memory profile`",
        "CANN runtime, operator workspace, fragmentation",
    ),
}
