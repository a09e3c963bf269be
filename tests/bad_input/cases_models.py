"""Models of other tools as train.init_from."""

import json
import pathlib

from case import Case, World
from foreign_models import LLAMA, foreign_weights, write_model

BARE = """\
# A recipe without the model's shape.
data: {path: data/book, seq_len: 32}
batch: {tokens_per_step: 128, rows_per_device: 4}
train: {steps: 2, device: cpu}
speedups: auto,-compile
"""
LINE = "train bare.yaml train.init_from=theirs"
MODEL = LLAMA | {"vocab_size": 257}


def model(world: World, **changes: object) -> pathlib.Path:
    """Write a recipe without a shape and a base model, changed by `changes`."""
    world.write("bare.yaml", BARE)
    size = {"vocab_size": changes.get("vocab_size", MODEL["vocab_size"])}
    return write_model(world.path / "theirs", MODEL | changes, foreign_weights(MODEL | size))


def write_config(folder: pathlib.Path, **changes: object) -> None:
    """Change a model's config.json alone."""
    document = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(document))


def only_config(world: World) -> None:
    (model(world) / "model.safetensors").unlink()


class Anything:
    """An object that a pickle may contain besides weights."""


def pickled_code(world: World) -> None:
    import torch

    only_config(world)
    torch.save({"model": Anything()}, world.path / "theirs/pytorch_model.bin")


def with_weights(world: World, change: str) -> None:
    """Remove a tensor, give it a different shape, or spoil one of its values."""
    weights = foreign_weights(MODEL)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "nan":
        weights[name][0, 0] = float("nan")
    else:
        weights[name] = weights[name][:-8].clone()
    write_model(model(world), MODEL, weights)


def to_convert(world: World, *names: str) -> None:
    """Write a recipe without a shape, and files that identify another tool's model."""
    world.write("bare.yaml", BARE)
    for name in names:
        world.write(f"theirs/{name}", b"GGUF" + bytes(60) if name.endswith("gguf") else "{}")


def one_shard(world: World) -> None:
    folder = model(world)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def torch_file(world: World, share: float) -> None:
    """Write the first bytes of a file of torch.save."""
    unnamed(world)
    path = world.path / "best_model.pt"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def changed_byte(world: World) -> None:
    """Write a model with torch.save, and change a byte of a tensor."""
    import torch

    only_config(world)
    weights = foreign_weights(MODEL)
    path = world.path / "theirs/pytorch_model.bin"
    torch.save(weights, path)
    tensor = weights["model.embed_tokens.weight"].numpy().tobytes()
    world.overwrite("theirs/pytorch_model.bin", path.read_bytes().index(tensor) + 9, b"\xa5")


def several(world: World, *names: str, content: object = None) -> None:
    """Write a recipe without a shape, and files of torch.save."""
    import torch

    world.write("bare.yaml", BARE)
    (world.path / "theirs").mkdir()
    for name in names:
        torch.save(content or {"w": torch.zeros(3)}, world.path / "theirs" / name)


def trainers(world: World) -> None:
    """Write what the Trainer of transformers saves."""
    model(world)
    (world.path / "out").mkdir()
    (world.path / "theirs").rename(world.path / "out/checkpoint-1000")
    (world.path / "out/checkpoint-500").mkdir()


def unnamed(world: World) -> None:
    """Write tensors that do not tell what they are."""
    import torch

    world.write("bare.yaml", BARE)
    torch.save({"model": {"w": torch.zeros(3)}}, world.path / "best_model.pt")


CASES = [
    Case(
        "a PEFT adapter as train.init_from",
        LINE,
        ("theirs is a PEFT adapter",),
        ("merge_and_unload", "then give merged in its place"),
        lambda w: to_convert(w, "adapter_config.json", "adapter_model.safetensors"),
    ),
    Case(
        "the weights of a PEFT adapter as train.init_from",
        f"{LINE}/adapter_model.safetensors",
        ("theirs/adapter_model.safetensors is a PEFT adapter",),
        ("merge_and_unload", "then give merged in its place"),
        lambda w: to_convert(w, "adapter_config.json", "adapter_model.safetensors"),
    ),
    Case(
        "a PEFT adapter as the model of generate",
        "generate theirs --prompt x",
        ("theirs is a PEFT adapter",),
        ("merge_and_unload", "then give merged in its place"),
        lambda w: to_convert(w, "adapter_config.json", "adapter_model.safetensors"),
    ),
    Case(
        "a checkpoint of litgpt as train.init_from",
        LINE,
        ("theirs is a checkpoint of litgpt",),
        ("litgpt convert_from_litgpt theirs converted", "then give converted in its place"),
        lambda w: to_convert(w, "lit_model.pth", "config.json", "model_config.yaml"),
    ),
    Case(
        "a GGUF file as train.init_from",
        f"{LINE}/model.gguf",
        ("theirs/model.gguf is a GGUF file",),
        ("safetensors that the file was made from",),
        lambda w: to_convert(w, "model.gguf"),
    ),
    Case(
        "a model without weights",
        LINE,
        ("theirs has no weights",),
        ("Download the whole repository",),
        only_config,
    ),
    Case(
        "a directory with several files of weights",
        LINE,
        ("several files that may be its weights: a.pt, b.pt.",),
        ("train.init_from=theirs/b.pt",),
        lambda w: several(w, "a.pt", "b.pt"),
    ),
    Case(
        "weights under keys that no tool uses",
        f"{LINE}/a.pt",
        ("theirs/a.pt contains no tensors by name: its keys are epoch, weights_of_mine",),
        ("torch.save(model.state_dict(), FILE)",),
        lambda w: several(w, "a.pt", content={"epoch": 1, "weights_of_mine": {}}),
    ),
    Case(
        "text in a file named as weights",
        f"{LINE}/a.pt",
        ("train.init_from=theirs/a.pt: it is a file of neither weights nor tokens",),
        ("If it is text, prepare it: `flatout prepare theirs/a.pt --out data/a`",),
        lambda w: (w.write("bare.yaml", BARE), w.write("theirs/a.pt", "It was a dark night.")),
    ),
    Case(
        "a model with pickled code",
        LINE,
        ("pytorch_model.bin contains Python code or objects in a pickle",),
        ("safetensors.torch.save_file",),
        pickled_code,
    ),
    Case(
        "a model that needs its own code",
        LINE,
        ("names code that defines the model (auto_map)",),
        ("delete auto_map",),
        lambda w: model(w, auto_map={"AutoModel": "modeling_own.Own"}),
    ),
    Case(
        "a model with a tensor missing",
        LINE,
        ("it has no model.layers.1.mlp.up_proj.weight",),
        ("Get all files again",),
        lambda w: with_weights(w, "missing"),
    ),
    Case(
        "a model with a tensor of a different shape",
        LINE,
        ("up_proj.weight is [40, 32], and its configuration means [48, 32]",),
        ("Get all files again",),
        lambda w: with_weights(w, "reshaped"),
    ),
    Case(
        "a model with a value that is not a number",
        LINE,
        ("up_proj.weight of theirs contains values that are not finite",),
        ("damaged", "diverged"),
        lambda w: with_weights(w, "nan"),
        progress="Starting with the weights",
    ),
    Case(
        "a model with a file missing",
        LINE,
        ("theirs has no model-00002-of-00002.safetensors",),
        ("Download the missing file",),
        one_shard,
    ),
    Case(
        "a model with a larger vocabulary than the tokenizer",
        LINE,
        ("vocabulary of 320", "data/book only 257: 63 rows"),
        ("own tokenizer", "model.vocab_size=320"),
        lambda w: model(w, vocab_size=320),
    ),
    Case(
        "a model with a smaller vocabulary than the tokenizer",
        LINE,
        ("vocabulary of 200", "data/book has 257"),
        ("own tokenizer",),
        lambda w: model(w, vocab_size=200),
    ),
    Case(
        "a model of an unknown architecture",
        LINE,
        ("the architecture 'mamba', which flatout does not read",),
        ("Start from a different model. docs/base-models.md",),
        lambda w: model(w, model_type="mamba"),
    ),
    Case(
        "a model that flatout cannot compute",
        LINE,
        ("scales rotary positions by 'yarn'",),
        ("Start from a different model",),
        lambda w: model(w, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    ),
    Case(
        "a quantised model",
        LINE,
        ("theirs are quantised",),
        ("before quantisation",),
        lambda w: model(w, quantization_config={"bits": 4}),
    ),
    Case(
        "a model whose configuration is larger than its tensors",
        LINE,
        ("theirs states a model of at least 32,000,0", "parameters, and its tensors have"),
        ("Restore its files",),
        lambda w: write_config(model(w), num_hidden_layers=10**9),
    ),
    Case(
        "a directory of the Trainer as train.init_from",
        "train my.yaml train.init_from=out",
        ("out is a directory with checkpoints of another tool",),
        ("train.init_from=out/checkpoint-1000",),
        trainers,
    ),
    Case(
        "an empty file as train.init_from",
        "train bare.yaml train.init_from=best_model.pt",
        ("best_model.pt is an empty file",),
        ("Copy or write it again",),
        lambda w: torch_file(w, 0),
    ),
    Case(
        "a truncated file as train.init_from",
        "train bare.yaml train.init_from=best_model.pt",
        ("Cannot read best_model.pt: the file is empty or truncated",),
        ("Copy or write the file again",),
        lambda w: torch_file(w, 0.6),
    ),
    Case(
        "a file of weights with a changed byte",
        "train bare.yaml train.init_from=theirs",
        ("pytorch_model.bin is damaged", "does not match its checksum"),
        ("Copy or write the file again",),
        changed_byte,
    ),
    Case(
        "a recipe with a different shape than the model",
        "train my.yaml train.init_from=theirs",
        ("model.d_model is 16 here and 32 there",),
        ("Remove the model's shape from the recipe",),
        model,
    ),
    Case(
        "a damaged config.json of a model",
        LINE,
        ("config.json is damaged",),
        ("Restore config.json",),
        lambda w: (model(w) / "config.json").write_text("{"),
    ),
    Case(
        "a file of weights that do not tell what they are",
        "train bare.yaml train.init_from=best_model.pt",
        ("best_model.pt (w) do not tell its architecture", "nor is it this run's model"),
        ("put both into one directory",),
        unnamed,
    ),
    Case(
        "a wrong name of a model on the hub",
        "train my.yaml train.init_from=hf:gpt2",
        ("hf:gpt2 does not name a repository",),
        ("hf:ORG/NAME@REVISION",),
    ),
    Case(
        "a model of the hub without hf:",
        "train my.yaml train.init_from=openai-community/gpt2",
        ("there is no such run",),
        ("hf:openai-community/gpt2",),
    ),
]
