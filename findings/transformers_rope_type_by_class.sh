#!/usr/bin/env bash
# transformers 5.24 applies rope_scaling={"type": "linear", ...} to Llama, and ignores it for Gemma 3 and OLMo 3.
#
# Older files of config.json name the kind of scaling `type`, newer ones `rope_type`. Classes with one rotation read
# both. Those with a rotation for each kind of layer (full and sliding attention) read `rope_type` alone: with `type`, the
# config keeps the entry beside rope_type='default', and positions are not divided by the factor. A warning calls
# `factor` an unrecognized key.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 5.24.0: llama: rope_type: linear, first frequency 0.125; type: linear, first frequency 0.125
#   transformers 5.24.0: gemma3_text: rope_type: linear, first frequency 0.125; type: default, first frequency 1.0
#   transformers 5.24.0: olmo3: rope_type: linear, first frequency 0.125; type: default, first frequency 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
cat > "$folder/run.py" <<'PYTHON'
import transformers

SIZES = {
    **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 10000.0, "pad_token_id": 0},
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
KINDS = {"llama": {}, "gemma3_text": BOTH, "olmo3": BOTH}
EXPECTED = {name: {"rope_type": ("linear", 0.125), "type": ("default", 1.0)} for name in KINDS}
EXPECTED["llama"]["type"] = ("linear", 0.125)
seen = {}
for name, layers in KINDS.items():
    seen[name] = {}
    for key in ("rope_type", "type"):
        settings = SIZES | layers | {"rope_scaling": {key: "linear", "factor": 8.0}}
        config = transformers.AutoConfig.for_model(name, **settings)
        buffers = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
        wanted = "full_attention_inv_freq" if layers else "inv_freq"
        (frequencies,) = (buffer for path, buffer in buffers.items() if path.endswith("rotary_emb." + wanted))
        rope = config.rope_parameters
        kind = (rope["full_attention"] if layers else rope)["rope_type"]
        seen[name][key] = (kind, float(frequencies[0]))
    figures = "; ".join(f"{key}: {kind}, first frequency {value}" for key, (kind, value) in seen[name].items())
    print(f"transformers {transformers.__version__}: {name}: {figures}")
raise SystemExit(seen != EXPECTED)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" 2>/dev/null
