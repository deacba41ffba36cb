"""Tuning of an imported language model on conversations: captions of Multi30k, translated into German on request.

python scripts/import_hf.py CHECKPOINT --run runs/smollm2
for split in train val test_2016_flickr; do python - DIR/multi30k/$split <<'END' > DIR/multi30k/$split.chat.jsonl
import gzip, json, sys
texts = (gzip.open(f"{sys.argv[1]}.{language}.gz", "rt", encoding="utf-8", newline="\\n") for language in ("en", "de"))
for en, de in zip(*texts, strict=True):
    print(json.dumps({"prompt": f"Translate into German: {en.strip()}", "response": de.strip()}))
END
done
python scripts/train.py --config configs/tune_chat.py:runs/smollm2 --data DIR

CHECKPOINT is a folder or a GGUF file with a chat template, such as SmolLM2-135M-Instruct; only LoRA updates are
trained, on the tokens of the answers.
"""

import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, OptimConfig, TrainConfig, to_config_dict


def get_config(run: str = "runs/smollm2") -> ConfigDict:
    """Returns the config of the language model, tokenizer and chat template of a run."""
    model = config.load(Path(run) / "config.json").model
    if model.family != "decoder_lm":
        raise UserError(f"{run} is a {model.family}: name the run of a language model")
    if model.position == "rotary":  # which has no parameters
        model = dataclasses.replace(model, max_length=min(model.max_length, 512))
    return to_config_dict(
        Config(
            name="tune_chat",
            task="chat",
            model=model,
            data=DataConfig(
                source="jsonl",
                train="multi30k/train.chat.jsonl",
                validation="multi30k/val.chat.jsonl",
                test="multi30k/test_2016_flickr.chat.jsonl",
                tokenizer="file",
                tokenizer_file=str(Path(run).resolve()),
                batching="packed",
                batch_size=8,
                window=256,
            ),
            optim=OptimConfig(schedule="cosine", learning_rate=5e-4, warmup_steps=20, final_fraction=0.1),
            train=TrainConfig(
                steps=500,
                eval_every=250,
                checkpoint_every=250,
                loss_chunk=32,
                start_from=run,
                lora_rank=16,
                lora_alpha=32.0,
            ),
            decode=DecodeConfig(max_new_tokens=64),
            eval=EvalConfig(batch_size=16, examples=200, samples=3),
        )
    )
