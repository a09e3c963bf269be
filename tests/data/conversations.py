"""Rows of conversations, and a Hugging Face tokenizer with a chat template, for tests."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(number, turns=2):
    """Return a row of `turns` questions, each with its answer."""
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {number} plus {turn}?"})
        messages.append({"role": "assistant", "content": f"It is {number + turn}."})
    return {"messages": messages}


def write_conversations(path, count=20, turns=2):
    """Write rows of conversations to a JSONL file."""
    rows = [conversation(number, turns) for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder, template=CHATML):
    """Write a byte-level tokenizer with ChatML's special tokens and its config to a folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
