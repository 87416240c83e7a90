"""The data set as verl's own RLHFDataset reads it: what stock verl drops in silence is an error here."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf


class Words:
    """A tokenizer of whitespace, whose template refuses a system role."""

    chat_template = "a template"
    name_or_path = "words"
    broken = False

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **kwargs):
        if any(message["role"] == "system" for message in messages):
            raise ValueError("System role not supported")
        text = " ".join(message["content"] for message in messages)
        if self.broken and tokenize:
            raise KeyError("no such word")
        return [len(word) for word in text.split()] if tokenize else text

    def __call__(self, text, add_special_tokens):
        return {"input_ids": text.split()}


def chat(text, role="user"):
    return [{"role": role, "content": text}]


def write(path, prompts, key="prompt"):
    pq.write_table(pa.Table.from_pylist([{key: prompt, "data_source": "toy"} for prompt in prompts]), path)
    return str(path)


def load(files, tmp_path, **settings):
    from verl.trainer.ppo.utils import create_rl_dataset

    settings = {"train_batch_size": 1, "max_prompt_length": 3, "filter_overlong_prompts": True} | settings
    config = OmegaConf.create({"cache_dir": str(tmp_path), "filter_overlong_prompts_workers": None} | settings)
    return create_rl_dataset(OmegaConf.create([files] if isinstance(files, str) else files), config, Words(), None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_prompts_that_are_too_long_are_dropped_as_ever(tmp_path):
    path = write(tmp_path / "a.parquet", [chat("one two"), chat("one two three four"), chat("one")])
    assert len(load(path, tmp_path)) == 2
    assert len(load(path, tmp_path, filter_overlong_prompts=False)) == 3


def test_a_template_that_raises_names_file_row_and_cause(tmp_path):
    good = write(tmp_path / "good.parquet", [chat("one"), chat("two")])
    bad = write(tmp_path / "bad.parquet", [chat("one"), chat("long " * 9), chat("be brief", "system")])
    with pytest.raises(ValueError) as error:
        load([good, bad], tmp_path)
    assert str(error.value).startswith("the chat template raises on a prompt")
    assert f"asked: {bad}, row 2, roles ['system']" in str(error.value)
    assert "found: ValueError: System role not supported" in str(error.value)


def test_the_first_row_is_rendered_even_where_nothing_is_filtered(tmp_path):
    path = write(tmp_path / "a.parquet", [chat("be brief", "system")])
    with pytest.raises(ValueError, match="the chat template raises on a prompt"):
        load(path, tmp_path, filter_overlong_prompts=False)


def test_a_set_that_ends_up_empty_says_how_long_the_prompts_are(tmp_path):
    path = write(tmp_path / "a.parquet", [chat("a b c d"), chat("a b c d e f g")])
    with pytest.raises(ValueError) as error:
        load(path, tmp_path)
    assert str(error.value).startswith("no prompt is left, because all are longer than data.max_prompt_length")
    assert f"data.max_prompt_length=3, {path}" in str(error.value)
    assert "2 rows of 4 to 7 tokens" in str(error.value)
    assert "set data.max_prompt_length to at least 4" in str(error.value)


def test_rows_that_are_dropped_for_another_reason_than_length_are_not_called_long(tmp_path, monkeypatch):
    monkeypatch.setattr(Words, "broken", True)
    path = write(tmp_path / "a.parquet", [chat("a b"), chat("a b c d e f g")])
    with pytest.raises(ValueError, match="though some are short enough: verl could not process them"):
        load(path, tmp_path)


@pytest.mark.parametrize("filtered", [True, False])
def test_a_missing_column_and_a_plain_text_prompt_are_named(tmp_path, filtered):
    path = write(tmp_path / "a.parquet", [chat("one")], key="question")
    with pytest.raises(ValueError, match="lacks the column 'prompt'"):
        load(path, tmp_path, filter_overlong_prompts=filtered)
    path = write(tmp_path / "b.parquet", ["one", "two"])
    with pytest.raises(ValueError, match="'prompt' does not hold chats"):
        load(path, tmp_path, filter_overlong_prompts=filtered)


def test_fewer_rows_than_a_batch_are_an_error_for_training_only(tmp_path):
    from verl.trainer.ppo.utils import create_rl_dataset

    path = write(tmp_path / "a.parquet", [chat("one"), chat("a b c d e")])
    with pytest.raises(
        ValueError, match="fewer rows than one batch.*\n  asked: data.train_batch_size=2\n  found: 1 rows"
    ):
        load(path, tmp_path, train_batch_size=2)
    config = OmegaConf.create({"cache_dir": str(tmp_path), "train_batch_size": 2, "filter_overlong_prompts": False})
    assert len(create_rl_dataset(path, config, Words(), None, is_train=False)) == 2
