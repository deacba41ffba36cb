"""A small checkpoint with special tokens of ChatML, its templates, and conversations."""

import json
from pathlib import Path

import tokenizers as hf

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As in Qwen 2 and SmolLM2."""
GENERATION = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
"""CHATML that says what the assistant writes."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = ["user", "assistant", "system", "You are a helpful assistant.", "How are you? I am fine.", "the cat sat"] * 5


def chat(*contents: str) -> list[dict[str, str]]:
    """Returns messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


CHATS = [
    chat("How are you?", "I am fine."),
    [{"role": "system", "content": "You are a helpful assistant."}, *chat("Hi", "Hello!", "And now?", "Wie bitte? Ä")],
    chat("a\n\nb ", "  two spaces, and a line\n"),
    chat("no answer", "one", "two"),
]


def write_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """Writes the files of a tokenizer, with a config.json that ends outputs with <|endoftext|>."""
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": list(SPECIAL), "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(TEXTS, hf.trainers.BpeTrainer(show_progress=False, **options))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "bos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    return folder
