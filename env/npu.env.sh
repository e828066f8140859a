# Variables of every process of a job on Ascend NPUs. One export a line, each with its reason; the plan prints them.
export OMP_NUM_THREADS=8  # 8 NPU processes share the host's cores
export TOKENIZERS_PARALLELISM=false  # forked tokenizer threads dead-lock in Ray workers
export HF_HUB_OFFLINE=1  # a job never downloads: its inputs are checked before it starts
export RAY_USAGE_STATS_ENABLED=0  # no telemetry from a batch job
export RAY_worker_niceness=0  # Ray gives workers niceness 15: here the workers are the job, nobody goes before them
export RAY_prestart_worker_first_driver=0  # idle workers that no actor of verl could use: they lack its runtime environment
export RAY_DEDUP_LOGS=0  # identical lines from several ranks are information
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # else `ray start --block` drains for up to 30 s at the end
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1  # verl places devices itself; ray PR 59163, verl issue 6741
export HCCL_CONNECT_TIMEOUT=1800  # 120 s is too short when ranks load weights at different speed (EI0006)
export HCCL_EXEC_TIMEOUT=7200  # 0 ("never") is not honoured: Ascend/pytorch issue 54
export PYTHONUNBUFFERED=1  # the last line before a crash reaches the log
export VLLM_ASCEND_ENABLE_NZ=0  # NZ weights break the weight sync of verl: its own NPU tests set this
