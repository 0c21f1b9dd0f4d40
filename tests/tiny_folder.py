"""A tiny random model in a folder, as mlx-lm loads it, with a token for each ASCII character."""

import json
from pathlib import Path

import mlx.core as mx
import tiny_models
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models

#: A turn is ``^role``, a line end, what is said, and ``~``, which ends the model's turn.
TEMPLATE = (
    "{% for m in messages %}^{{ m.role }}\n{{ m.content }}~\n{% endfor %}"
    "{% if add_generation_prompt %}^assistant\n{% endif %}"
)


def write(folder: Path, architecture="llama", template=None, **changes) -> str:
    """Write the model into the folder, with a chat template if there is to be one.

    Args:
        changes: what shall be otherwise in its config.
    """
    model = tiny_models.build(architecture, **changes)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    model_config = tiny_models.CONFIGS[architecture] | changes
    (folder / "config.json").write_text(json.dumps(model_config))
    tokenizer = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    if template is not None:
        tokenizer.add_special_tokens([AddedToken("~", special=True)])
        config["eos_token"] = "~"
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
