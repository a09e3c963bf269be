"""A GGUF file for llama.cpp and the tools built on it, written through the `gguf` package.

Letters: H heads, C head size, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.inference.export.gguf_tokenizer import write_vocabulary
from flatout.inference.export.huggingface import latest
from flatout.inference.export.packages import require_package
from flatout.inference.export.shards import Planned, raw_bytes
from flatout.inference.export.source import Source
from flatout.inference.export.tokenizer_files import tokenizer_json
from flatout.models.language_model import LanguageModelConfig
from flatout.models.transformer import TransformerConfig
from flatout.progress import Progress
from flatout.storage.files import sync

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""llama.cpp's number for the type of most weights."""
Read = Callable[[str], Tensor]
Part = Callable[[Tensor], Tensor]
INSTEAD = "Export with --to huggingface or --to safetensors."
BLOCK = {
    "attention_norm": "attn_norm",
    "attention.qkv": "attn_qkv",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention.output": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
"""GGUF's names of the parts of a block, by flatout's."""
WHOLE = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "unembedding": "output",
}
"""GGUF's names of the parts around the blocks."""
SHARED: dict[str, object] = {
    "parallel_residual": False,
    "rotary_scaling": "none",
    "rotary_dims": None,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "window": None,
    "post_norm": False,
    "attention_softcap": None,
}
"""Keys under `model.` that every family has here."""
_LLAMA: dict[str, object] = {
    **SHARED,
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {
        **SHARED,
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "has_qkv_bias": True,
        "qk_norm": False,
    },
    "llama": _LLAMA | {"has_qkv_bias": False, "qk_norm": False},
    "qwen2": _LLAMA | {"has_qkv_bias": True, "qk_norm": False},
    "qwen3": _LLAMA | {"has_qkv_bias": False, "qk_norm": True},
}
"""What models of each of llama.cpp's families have, by its name."""


def write_gguf(source: Source, folder: Path, chat_template: str | None, progress: Progress) -> str:
    """Write the model and its tokenizer to one GGUF file, and return llama.cpp's family name.

    Vectors are fp32 in any case, as llama.cpp needs them.

    Raises: ConfigError when no family has the model's shape; DataError for a tokenizer that GGUF
            cannot express; MissingPackage; CheckpointError.
    """
    require_package("gguf", "GGUF files are written with")
    from gguf import GGMLQuantizationType, GGUFWriter

    config = source.model
    family = family_of(config)
    assert isinstance(config, TransformerConfig), "family_of has checked it"
    document = tokenizer_json(source.tokenizer)
    named = {name: index for name, (_, index) in source.tokenizer.named_tokens().items()}
    writer = GGUFWriter(folder / FILE, family)
    try:
        _write_shape(writer, source, config)
        write_vocabulary(writer, document, source.tokenizer.eot_id, named, config.vocab_size)
        writer.add_eot_token_id(source.turn_end)
        if chat_template:
            writer.add_chat_template(chat_template)
        planned = list(_tensors(source, config, family))
        for tensor in planned:
            kind = GGMLQuantizationType[_TYPES[tensor.dtype]]
            writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.num_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(tensor.num_bytes for tensor in planned)
        with progress.task("Writing weights", total=total, unit="bytes") as task:
            for tensor in planned:
                writer.write_tensor_data(np.asarray(raw_bytes(tensor.loaded())))
                task.advance(tensor.num_bytes)
    finally:
        writer.close()
    sync(folder / FILE)
    return family


def family_of(config: LanguageModelConfig) -> str:
    """Return the family of llama.cpp that has the shape of a model.

    Raises: ConfigError with the keys that none of them has.
    """
    if not isinstance(config, TransformerConfig):
        raise ConfigError("GGUF has no family for this kind of model.", fix=INSTEAD)
    wrong = {
        family: [key for key, value in keys.items() if getattr(config, key) != value]
        for family, keys in FAMILIES.items()
    }
    if config.num_heads * config.head_size != config.d_model or config.kv_heads != config.num_heads:
        wrong["gpt2"].append("num_kv_heads")
    family = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[family]:
        differing = " and ".join(f"model.{key}" for key in wrong[family])
        raise ConfigError(
            f"No family of llama.cpp that flatout writes has the shape of this model. The nearest, "
            f"{family}, differs in {differing.replace('has_qkv_bias', 'qkv_bias')}.",
            fix=INSTEAD,
        )
    return family


def _write_shape(writer: GGUFWriter, source: Source, config: TransformerConfig) -> None:
    writer.add_type("model")
    writer.add_name(source.folder.absolute().name)
    writer.add_context_length(config.num_positions)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(_FILE_TYPES[source.dtype_of("token_embedding.weight")])
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rotary_base)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)


def _tensors(source: Source, config: TransformerConfig, family: str) -> Iterator[Planned]:
    """Yield the tensors under GGUF's names."""
    read = latest(source.weights.read)
    for name, whole in source.weights.shapes.items():
        for theirs, part in _parts(name, config, family):
            shape = tuple(part(torch.empty(whole, device="meta")).shape)
            is_fp32 = len(shape) == 1 or name.startswith("position_embedding")
            dtype = torch.float32 if is_fp32 else source.dtype_of(name)
            yield Planned(theirs, dtype, shape, _converted(source, read, name, part, dtype))


def _converted(
    source: Source, read: Read, name: str, part: Part, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that reads a part of a weight in the type of the export."""
    if dtype == torch.float32:
        return lambda: part(read(name)).float()
    return lambda: source.converted(name, part(read(name)))


def _parts(name: str, config: TransformerConfig, family: str) -> Iterator[tuple[str, Part]]:
    """Yield GGUF's name of each part of a weight, and a function that returns the part."""
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        yield f"{WHOLE[module]}.{kind}", whole
        return
    _, layer, inside = module.split(".", 2)
    start = f"blk.{layer}"
    if inside == "mlp.gate_up":
        rows = [config.mlp_width] * 2
        yield f"{start}.ffn_gate.{kind}", partial(_rows, rows=rows, index=0)
        yield f"{start}.ffn_up.{kind}", partial(_rows, rows=rows, index=1)
    elif inside == "attention.qkv" and family != "gpt2":
        counts = [config.num_heads, config.kv_heads, config.kv_heads]
        rows = [count * config.head_size for count in counts]
        for index, letter in enumerate("qkv"):
            heads = counts[index] if family == "llama" and letter != "v" else None
            part = partial(_rows, rows=rows, index=index, interleaved_heads=heads)
            yield f"{start}.attn_{letter}.{kind}", part
    else:
        yield f"{start}.{BLOCK[inside]}.{kind}", whole


def whole(weight: Tensor) -> Tensor:
    """Return a weight unchanged.

    Shapes:  any.
    """
    return weight


def _rows(
    weight: Tensor, *, rows: list[int], index: int, interleaved_heads: int | None = None
) -> Tensor:
    """Return one of several parts that a weight stacks.

    llama.cpp pairs neighbouring components of a Llama's head for rotary positions, where flatout
    pairs component i with i + C/2: `interleaved_heads` heads are reordered.
    """
    part: Tensor = torch.split(weight, rows)[index]
    if interleaved_heads is None:
        return part
    halves = torch.unflatten(part, 0, (interleaved_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
