"""What quickstart trains when it is given nothing: a tiny Qwen2 model, its byte-level tokenizer, prompts and a reward.

The task: a prompt names a kind of characters ("river in vowels"), the answer must consist of them. A model with random
weights scores a few per cent; a perfect one has learned to read its prompt. Everything follows from the seed.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from verl_fl.cli import toy_reward

WORDS = (
    "sun",
    "moon",
    "star",
    "tree",
    "rain",
    "wind",
    "stone",
    "river",
    "cloud",
    "field",
    "road",
    "house",
    "ship",
    "lamp",
)
NUM_PROMPTS = 256
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, seed: int) -> None:
    """Write a Qwen2 model of about 100,000 random weights and its tokenizer to ``folder``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Five times the usual spread: prompts that differ in one word must lead to different states from the start.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)


def _tokenizer() -> Any:
    """One token for each of the 256 bytes, and three special ones; verl's Qwen templates need a newline token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_data(train: Path, reward: Path, seed: int) -> None:
    """Write the prompts as parquet, in verl's columns, and the reward function as a file to read and to change."""
    import pyarrow
    import pyarrow.parquet

    kinds = list(toy_reward.CHARACTERS)
    pairs = [(WORDS[index // len(kinds) % len(WORDS)], kinds[index % len(kinds)]) for index in range(NUM_PROMPTS)]
    random.Random(seed).shuffle(pairs)
    rows = [
        {
            "data_source": "verl_fl/quickstart",
            "prompt": [{"role": "user", "content": f"{word} in {kind}"}],
            "reward_model": {"style": "rule", "ground_truth": kind},
            "extra_info": {"index": index},
        }
        for index, (word, kind) in enumerate(pairs)
    ]
    train.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), train)
    shutil.copyfile(toy_reward.__file__, reward)
