"""Every rule finds its trap and stays silent beside it; the early settings of a report would have been stopped."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from atlasrl import lint, recipe, stacks
from atlasrl.lint import arithmetic, case

LARGE = "deepseek-v3-671b-dapo"
T, A, R = case.TRANSFORMER, case.ACTOR, case.ROLLOUT
VLLM = f"++{case.VLLM}.additional_config"
GRAPH = f"{VLLM}.torchair_graph_config"


def judge(*changes, base=LARGE, stack=None, nodes=None, devices=None, env=None, index=None, config=None, folder=None):
    """Ids of the rules that a recipe breaks. `key=value` changes are those of --set; env replaces variables."""
    changes = list(changes)
    if index is not None or config is not None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(index or [], "m")})
        )
        (folder / "config.json").write_text(json.dumps(config or {}))
        changes.append(f"model.cast_path={folder}")
    loaded = recipe.load(base, changes)
    chosen = stacks.load(stack) if stack else None
    environment = None
    if env is not None:
        environment = case.gather(loaded, 1, 1, chosen).environment | env
        environment = {name: value for name, value in environment.items() if value is not None}
    nodes, devices = nodes or loaded.nodes, devices or loaded.devices_per_node
    return {each.rule for each in lint.findings(loaded, nodes, devices, chosen, environment)}


def without(fix):
    return {"env": {"ATLASRL_WITHOUT_FIX": fix}}


def setting(key, value):
    return f"verl.{key}={value}"


ARTICLE, NEWER = {"stack": "a2-article"}, {"stack": "a2-0.7.1"}
GRAPHS = (
    setting(f"{R}.enforce_eager", "false"),
    setting(f"{GRAPH}.enabled", "true"),
    setting(f"{VLLM}.ascend_scheduler_config.enabled", "true"),
    setting(f"{VLLM}.refresh", "true"),
)
SKIP = setting(f"{R}.skip_rollout", "true")
MOON = {"base": "moonlight-16b-dapo"}
INV_FREQ = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.input_layernorm.weight"]

# rule -> (failing, passing): changes of the 671B recipe, and keywords of `judge`
EXAMPLES = {
    "trainer-verl": ([ARTICLE, NEWER], [{}, {"base": "tiny"}, ("device=cuda",)]),
    "refused-settings": ([("dapo.mini_batch_size=48",)], [()]),
    "unknown-setting": (
        [(setting("actor_rollout_ref.actor.clip_ratio_hihg", "0.3"),), (setting("++" + f"{R}.seed", "1"),)],
        [(setting("trainer.balance_batch", "false"), setting(f"++{T}.anything", "1"))],
    ),
    "reserved-setting": ([(setting("trainer.resume_mode", "auto"),)], [(setting("trainer.logger", "[console]"),)]),
    "validation-without-data": ([("data.val=null",)], [("data.val=null", "validate_every=0")]),
    "kl-reference": ([(setting(f"{A}.use_kl_loss", "true"),)], [(setting(f"{A}.use_kl_loss", "false"),)]),
    "training-split": (
        [("parallel.first_stage_layers=5",), ("parallel.tensor=16",), ("parallel.expert=24",), {"nodes": 24}],
        [("parallel.first_stage_layers=4", "parallel.last_stage_layers=1"), {"nodes": 64}],
    ),
    "rollout-split": ([("rollout.expert=48",), ("rollout.tensor=16",)], [("rollout.expert=32",)]),
    "batch-split": ([("dapo.tokens_per_device=4096",)], [("dapo.tokens_per_device=20480",)]),
    "context-latent": ([("parallel.context=2", "parallel.pipeline=8")], [()]),
    "unsharded-experts": (
        [("parallel.offload=false", "parallel.optimizer_on_host=0")],
        [("parallel.offload=false",), ("parallel.offload=false", "parallel.optimizer_on_host=0", "parallel.expert=8")],
    ),
    "stage-accounting": (
        [(setting(f"++{T}.account_for_loss_in_pipeline_split", "true"),)],
        [(setting(f"++{T}.account_for_loss_in_pipeline_split", "false"),)],
    ),
    "draft-layers": (
        [{"config": {"num_hidden_layers": 8, "num_nextn_predict_layers": 1}}],
        [
            {"config": {"num_hidden_layers": 8, "num_nextn_predict_layers": 0}},
            {"config": {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}},
        ],
    ),
    "rotary-key-gradient": (
        [without("mla-rotary-key")],
        [
            {},
            ("parallel.tensor=1", without("mla-rotary-key")),
            {"base": "qwen3-30b-a3b-dapo"} | without("mla-rotary-key"),
        ],
    ),
    "optimizer-flag": (
        [(setting("actor_rollout_ref.actor.megatron.use_distributed_optimizer", "false"),)],
        [("parallel.distributed_optimizer=false",)],
    ),
    "pipeline-resume": ([without("param-group-order")], [{}, without("other-fix")]),
    "router-groups": ([without("router-groups")], [{}, {"base": "qwen3-30b-a3b-dapo"} | without("router-groups")]),
    "router-bias": ([(setting(f"++{T}.moe_router_bias_update_rate", "0.001"),)], [()]),
    "rope-fusion": (
        [(setting(f"++{T}.apply_rope_fusion", "true"),)],
        [(setting(f"++{T}.apply_rope_fusion", "true"), {"base": "qwen3-30b-a3b-dapo"})],
    ),
    "flash-attention": (
        [(setting(f"++{T}.use_flash_attn", "false"),)],
        [(setting(f"++{T}.use_flash_attn", "true"),), ("device=cuda",)],
    ),
    "cuda-only": (
        [
            (setting(f"++{T}.moe_enable_deepep", "true"),),
            (setting(f"++{T}.moe_token_dispatcher_type", "flex"),),
            (setting(f"{A}.use_torch_compile", "true"),),
        ],
        [
            (setting(f"++{T}.moe_token_dispatcher_type", "alltoall"),),
            ("device=cuda", setting(f"++{T}.moe_enable_deepep", "true")),
        ],
    ),
    "two-optimizer-homes": (
        [(setting(f"++{T}.swap_optimizer", "true"),)],
        [(setting(f"++{T}.swap_optimizer", "true"), "parallel.optimizer_on_host=0")],
    ),
    "overlong-buffer": (
        [("dapo.overlong.buffer_tokens=8192",)],
        [("dapo.overlong.buffer_tokens=1638",), ("dapo.overlong=null",)],
    ),
    "generation-budget": (
        [("dapo.max_gen_batches=3", "dapo.gen_batch_size=32")],
        [
            ("dapo.max_gen_batches=3", "dapo.gen_batch_size=32", "dapo.dynamic_sampling=false"),
            ("dapo.max_gen_batches=1",),
        ],
    ),
    "thin-generation-budget": ([("dapo.max_gen_batches=2",)], [("dapo.max_gen_batches=2", "dapo.when_exhausted=fill")]),
    "one-answer": ([("rollout.samples=1",)], [("rollout.samples=2",)]),
    "clip-lower": ([("dapo.clip_low=0.28", "dapo.clip_high=0.2")], [("dapo.clip_low=0.2", "dapo.clip_high=0.2")]),
    "stale-policy": ([("dapo.mini_batch_size=4",)], [("dapo.mini_batch_size=8",)]),
    "endless-warmup": ([("steps=10",)], [("steps=11",), ("steps=10", "optimizer.warmup_steps=0")]),
    "long-warmup": ([("backend=fsdp2", "steps=10")], [("backend=fsdp2", "steps=11"), ("steps=10",)]),
    "cut-distribution": ([("rollout.top_p=0.7",)], [()]),
    "shuffled-comparison": (
        [("data.shuffle=true", "guard.baseline=/b")],
        [("data.shuffle=false", "guard.baseline=/b"), ("data.shuffle=true",)],
    ),
    "cached-answers-shuffled": ([(SKIP, "data.shuffle=true", ARTICLE)], [(SKIP, ARTICLE)]),
    "cached-answers-validated": ([(SKIP, ARTICLE)], [(SKIP, "validate_every=0", ARTICLE)]),
    "stale-latent-weights": (
        [without("weights-after-sync")],
        [{}, NEWER | without("weights-after-sync"), {"base": "qwen3-30b-a3b-dapo"} | without("weights-after-sync")],
    ),
    "list-argument": (
        [(setting(f"++{case.VLLM}.cuda_graph_sizes", "[1, 2]"),)],
        [
            (setting(f"++{case.VLLM}.cuda_graph_sizes", "[1, 2]"), NEWER),
            (setting(f"++{case.VLLM}.compilation_config", "{cudagraph_capture_sizes: [1, 2]}"),),
            (setting(f"++{case.VLLM}.compilation_config.cudagraph_capture_sizes", "[1, 2]"),),
        ],
    ),
    "dead-length": (
        [(setting(f"{R}.max_model_len", "10240"),)],
        [(setting(f"{R}.max_model_len", "10240"), NEWER), (setting(f"++{case.VLLM}.max_model_len", "10240"),)],
    ),
    "rotary-without-yarn": (
        [MOON | ARTICLE, MOON | without("plain-rotary"), ("rollout.graph=torchair", MOON)],
        [MOON, without("plain-rotary"), ("device=cuda", MOON | without("plain-rotary"))],
    ),
    "sync-rollout": (
        [(setting(f"{R}.mode", "sync"),), (setting(f"{R}.mode", "async"), ARTICLE)],
        [(setting(f"{R}.mode", "sync"), ARTICLE), ARTICLE],
    ),
    "expert-groups": (
        [ARTICLE, ("environment.VLLM_DP_SIZE=4", ARTICLE)],
        [("environment.VLLM_DP_SIZE=8", ARTICLE), {}, ("rollout.expert=1", ARTICLE)],
    ),
    "sleep-segments": (
        [("environment.PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",)],
        [
            ("environment.PYTORCH_NPU_ALLOC_CONF=expandable_segments:False",),
            ("environment.PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", setting(f"{R}.free_cache_engine", "false")),
        ],
    ),
    "sleep-not-compiled": ([("environment.COMPILE_CUSTOM_KERNELS=0",)], [("environment.COMPILE_CUSTOM_KERNELS=1",)]),
    "eager-off": (
        [(setting(f"{R}.enforce_eager", "false"), ARTICLE)],
        [
            (*GRAPHS, ARTICLE),
            ("rollout.graph=torchair", ARTICLE),
            (setting(f"{R}.enforce_eager", "false"), {"base": "qwen3-30b-a3b-dapo"} | ARTICLE),
        ],
    ),
    "experimental-graph": (
        [(setting(f"{R}.enforce_eager", "false"),), ("rollout.graph=acl",)],
        [GRAPHS, ("rollout.graph=torchair",), ()],
    ),
    "torchair-eager": ([(setting(f"{GRAPH}.enabled", "true"),)], [GRAPHS, ("rollout.graph=torchair",)]),
    "torchair-scheduler": ([GRAPHS[:2]], [GRAPHS, ("rollout.graph=torchair",)]),
    "torchair-options": (
        [
            (setting(f"{GRAPH}.graph_batch_sizes", "[16]"),),
            (*GRAPHS, setting(f"{GRAPH}.graph_batch_sizes", "16")),
            (
                *GRAPHS,
                setting(f"{GRAPH}.graph_batch_sizes", "[16]"),
                setting(f"{GRAPH}.graph_batch_sizes_init", "true"),
            ),
        ],
        [(*GRAPHS, setting(f"{GRAPH}.graph_batch_sizes", "[16]")), (setting(GRAPH, "{enabled: false}"),)],
    ),
    "torchair-frozen": (
        [GRAPHS[:3], (*GRAPHS, setting(f"{GRAPH}.use_cached_graph", "true"))],
        [GRAPHS, ("rollout.graph=torchair",)],
    ),
    "slow-latent-prefill": (
        [("rollout.chunked_prefill=false", ARTICLE)],
        [
            ARTICLE,
            ("rollout.chunked_prefill=false", setting(VLLM, "{chunked_prefill_for_mla: true}"), ARTICLE),
            ("rollout.chunked_prefill=false", "dapo.train_batch_size=32", ARTICLE),
            ("rollout.chunked_prefill=false",),
        ],
    ),
    "router-mismatch": (
        [(setting("actor_rollout_ref.actor.megatron.use_dist_checkpointing", "true"),)],
        [(setting("actor_rollout_ref.actor.megatron.use_dist_checkpointing", "false"),)],
    ),
    "dead-skip": ([(SKIP,)], [(SKIP, ARTICLE)]),
    "resume-import": ([ARTICLE, without("load-without-transformer-engine")], [{}, NEWER]),
    "save-arguments": (
        [("backend=megatron", {"base": "tiny"} | without("mbridge-arguments"))],
        [("backend=megatron", {"base": "tiny"}), without("mbridge-arguments")],
    ),
    "weights-on-one-device": (
        [ARTICLE | without("mbridge-device")],
        [ARTICLE, without("mbridge-device"), ("device=cuda", ARTICLE | without("mbridge-device"))],
    ),
    "late-save": ([(setting(f"{A}.checkpoint.async_save", "true"),)], [()]),
    "save-contents": ([(setting(f"{A}.checkpoint.save_contents", "[model, extra]"),)], [()]),
    "stale-index-keys": (
        [
            {"index": INV_FREQ},
            {"index": ["model.layers.0.mlp.up_proj.weight_scale_inv"]},
            {
                "index": ["model.layers.61.enorm.weight"],
                "config": {"num_hidden_layers": 61, "num_nextn_predict_layers": 0},
            },
        ],
        [{"index": INV_FREQ[1:]}, {"index": ["model.layers.60.x"], "config": {"num_hidden_layers": 61}}],
    ),
    "one-checkpoint": ([("checkpoint.keep=1",)], [("checkpoint.keep=1", "steps=10")]),
    "no-checkpoint": ([("checkpoint.save_every=500",)], [()]),
    "fresh-host-optimizer": ([()], [("parallel.optimizer_on_host=0",)]),
    "raw-weights": ([(setting("actor_rollout_ref.actor.megatron.use_mbridge", "false"),)], [()]),
    "visible-devices": ([("environment.ASCEND_RT_VISIBLE_DEVICES=0",)], [()]),
    "rank-variables": ([("environment.LOCAL_RANK=0",)], [("environment.VLLM_DP_SIZE=8", ARTICLE)]),
    "connect-timeout": (
        [{"env": {"HCCL_CONNECT_TIMEOUT": value}} for value in ("120", "9000", "long", None)],
        [{"env": {"HCCL_CONNECT_TIMEOUT": "600"}}, {"base": "tiny"}],
    ),
    "endless-timeout": ([("environment.HCCL_EXEC_TIMEOUT=0",)], [()]),
    "differing-timeouts": (
        [(setting("actor_rollout_ref.nccl_timeout", "1200"),)],
        [(setting("actor_rollout_ref.nccl_timeout", "7200"),)],
    ),
    "large-buffers": ([("environment.HCCL_BUFFSIZE=800",)], [("environment.HCCL_BUFFSIZE=300",)]),
    "blocking-launch": ([("environment.ASCEND_LAUNCH_BLOCKING=1",)], [("environment.ASCEND_LAUNCH_BLOCKING=0",)]),
    "old-engine": ([("environment.VLLM_USE_V1=0",)], [("environment.VLLM_USE_V1=1",)]),
    "private-format": (
        [{"env": {"VLLM_ASCEND_ENABLE_NZ": "1"}}, {"env": {"VLLM_ASCEND_ENABLE_NZ": None}}],
        [{}, {"env": {"VLLM_ASCEND_ENABLE_NZ": None}} | ARTICLE],
    ),
    "half-deterministic": (
        [('environment.HCCL_DETERMINISTIC="true"',), ('environment.CLOSE_MATMUL_K_SHIFT="1"',)],
        [
            (
                'environment.HCCL_DETERMINISTIC="true"',
                'environment.CLOSE_MATMUL_K_SHIFT="1"',
                'environment.ATB_MATMUL_SHUFFLE_K_ENABLE="0"',
                'environment.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
            ),
            (),
        ],
    ),
}


def arguments(example, folder):
    """An example is a tuple of changes, a mapping of keywords, or a tuple with a mapping at its end."""
    example = (example,) if isinstance(example, dict) else example
    changes = [each for each in example if isinstance(each, str)]
    keywords = {key: value for each in example if isinstance(each, dict) for key, value in each.items()}
    return changes, keywords | {"folder": folder}


def cases(which):
    return [
        pytest.param(rule, each, id=f"{rule}-{n}")
        for rule, pair in EXAMPLES.items()
        for n, each in enumerate(pair[which])
    ]


@pytest.mark.parametrize("rule, example", cases(0))
def test_the_trap_is_found(rule, example, tmp_path):
    changes, keywords = arguments(example, tmp_path)
    assert rule in judge(*changes, **keywords)


@pytest.mark.parametrize("rule, example", cases(1))
def test_beside_the_trap_the_rule_is_silent(rule, example, tmp_path):
    changes, keywords = arguments(example, tmp_path)
    assert rule not in judge(*changes, **keywords)


def test_a_mindspeed_of_before_the_mended_scale_is_found():
    good = stacks.load("a2-0.7.0")
    bad = good.model_copy(update={"capabilities": good.capabilities.model_copy(update={"mla_softmax_scale": False})})
    loaded = recipe.load(LARGE)
    assert "softmax-scale" in {each.rule for each in lint.findings(loaded, 32, 8, bad)}
    assert "softmax-scale" not in {each.rule for each in lint.findings(loaded, 32, 8, good)}


def test_every_rule_has_a_failing_and_a_passing_example():
    assert {each.id for each in lint.rules()} == EXAMPLES.keys() | {"softmax-scale"}
    assert all(bad and good for bad, good in EXAMPLES.values())


def test_rules_are_told_apart_and_say_why_where_from_and_what_to_do():
    rules = lint.rules()
    assert len({each.id for each in rules}) == len(rules) >= 25
    for each in rules:
        assert min(len(each.reason), len(each.source), len(each.remedy)) > 9, each.id
        assert "\n" not in f"{each.reason}{each.source}{each.remedy}"


def test_the_early_settings_of_a_public_report_meet_what_cost_its_authors_a_month():
    """DAPO of DeepSeek-V3 671B on 32 x 8 NPUs as first tried: vLLM-Ascend 0.10.0rc1, a MindSpeed of the tag, a verl
    before PR #4130 with dummy weights, mbridge 0.13.1 with Moonlight's index, GBS 128, graphs without eager."""
    later = stacks.load("a2-article")
    early = later.model_copy(
        update={
            "capabilities": later.capabilities.model_copy(
                update={"weights_processed_after_sync": False, "mla_softmax_scale": False}
            )
        }
    )
    changes = [
        setting(f"{R}.load_format", "dummy"),
        "rollout.chunked_prefill=false",
        "environment.ATLASRL_WITHOUT_FIX=mbridge-device",
        setting(f"{R}.enforce_eager", "false"),
        setting("actor_rollout_ref.actor.megatron.use_dist_checkpointing", "true"),
        "environment.PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        "data.shuffle=true",
        SKIP,
    ]
    found = lint.findings(recipe.load(LARGE, changes), 32, 8, early)
    assert {each.rule for each in found} >= {
        "stale-latent-weights",  # gibberish from dummy weights
        "softmax-scale",  # reward climbs slower than on GPUs
        "slow-latent-prefill",  # out of memory at GBS 128
        "eager-off",
        "sleep-segments",
        "resume-import",  # KeyError master_param, import transformer_engine
        "weights-on-one-device",  # the manual edit of mbridge
        "expert-groups",
        "router-mismatch",  # dist against mbridge curves
        "cached-answers-shuffled",
    }
    assert found[0].level == "error"


@pytest.mark.parametrize("name", ["tiny", LARGE, "moonlight-16b-dapo", "qwen3-30b-a3b-dapo"])
def test_shipped_recipes_have_no_error_on_their_default_stack(name):
    loaded = recipe.load(name)
    found = lint.findings(loaded, loaded.nodes, loaded.devices_per_node)
    assert [str(each) for each in found if each.level == "error"] == []


def test_an_unknown_model_and_no_stack_silence_what_cannot_be_known():
    loaded = recipe.load(LARGE, ["model.path=/models/unheard-of", "device=cuda"])
    assert not [each for each in lint.findings(loaded, 32, 8) if each.level == "error"]


def test_a_damaged_index_is_left_to_the_stage_that_reads_it(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[1, 2")
    (tmp_path / "config.json").write_text("[]")
    assert "stale-index-keys" not in judge(f"model.cast_path={tmp_path}")


def test_an_unknown_setting_names_the_nearest():
    loaded = recipe.load(LARGE, [setting(f"{A}.clip_ratio_hihg", "0.3")])
    [found] = [each for each in lint.findings(loaded, 32, 8) if each.rule == "unknown-setting"]
    assert f"did you mean {A}.clip_ratio_high?" in str(found)


def test_arithmetic_of_the_large_recipe():
    numbers = arithmetic.of_recipe(
        recipe.load(LARGE, ["dapo.gen_batch_size=96"]), 32, 8, prompts=17000, step_minutes=30
    )
    assert numbers.samples == 128 * 16 and numbers.updates == 4 and numbers.samples_per_update == 512
    assert numbers.generated_least == 2 * 96 * 16  # two generations of 96 hold 128 prompts
    assert numbers.generated_most == 10 * 96 * 16
    assert numbers.steps_per_epoch == 17000 // 192
    assert numbers.hours == 100


def test_arithmetic_reads_the_rows_of_the_data_and_says_what_it_does_not_know():
    tiny = recipe.load("tiny")
    numbers = arithmetic.of_recipe(tiny, 1, 1)
    import pyarrow.parquet

    assert numbers.dataset == pyarrow.parquet.read_table(tiny.data.train).num_rows
    assert numbers.hours is None and any("hours unknown" in line for line in numbers.lines())


def test_the_command_ends_with_one_on_an_error_and_two_on_a_wrong_question():
    from atlasrl.cli.lint import main

    def run(*arguments):
        return CliRunner().invoke(main, arguments)

    bad = run(LARGE, "--stack", "a2-article", "--json")
    assert bad.exit_code == 1
    assert "expert-groups" in {each["rule"] for each in json.loads(bad.stdout)["findings"]}
    wrong = run(LARGE, "--stack", "a2-artikel")
    assert wrong.exit_code == 2 and "did you mean a2-article" in wrong.stderr
    assert run("tiny").exit_code == 0
