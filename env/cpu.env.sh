# Variables of every process of a job on a CPU. One export a line, each with its reason; the plan prints them.
export OMP_NUM_THREADS=1  # 2 processes x 2 threads on 2 cores were about 15x slower than 1 thread each
export OMP_WAIT_POLICY=PASSIVE  # an idle OpenMP thread must not spin on a core that others need
export TOKENIZERS_PARALLELISM=false  # forked tokenizer threads dead-lock in Ray workers
export HF_HUB_OFFLINE=1  # a job never downloads: its inputs are checked before it starts
export TRANSFORMERS_VERBOSITY=error  # warnings of 100 workers hide the one line that matters
export RAY_USAGE_STATS_ENABLED=0  # no telemetry from a batch job
export RAY_worker_niceness=0  # Ray gives workers niceness 15: here the workers are the job, nobody goes before them
export RAY_prestart_worker_first_driver=0  # idle workers that no actor of verl could use: they lack its runtime environment
export RAY_DEDUP_LOGS=0  # identical lines from several ranks are information
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # else `ray start --block` drains for up to 30 s at the end
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0  # Ray's future default, and silences one warning per worker
export GLOO_SOCKET_IFNAME=lo  # all nodes are on this machine; gloo must not pick a bridge or VPN
export PYTHONUNBUFFERED=1  # the last line before a crash reaches the log
export VERL_USE_EXTERNAL_MODULES=atlasrl.trainer.cpu  # verl loads the CPU device layer in each process
