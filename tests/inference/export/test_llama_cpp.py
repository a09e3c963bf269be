"""llama.cpp's own converter reads an export for transformers, and llama.cpp computes its logits."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export_shapes import SHAPES

from flatout.data.tokenizers import make_tokenizer
from flatout.inference.export.export import export_run
from flatout.inference.export.source import open_source
from flatout.inference.load import load_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT = "the run ends, and the next one begins. " * 20
UNKNOWN = (
    'raise NotImplementedError("BPE pre-tokenizer was not recognized - '
    'update get_vocab_base_pre()")'
)


@pytest.fixture
def converter(tmp_path):
    """The converter of the llama.cpp that `make test-extras` built.

    It knows published vocabularies only: here, any other one splits text as GPT-2's.
    """
    for package in ("llama_cpp", "transformers"):
        pytest.importorskip(package)
    original = Path(sys.prefix) / "llama.cpp" / "vendor" / "llama.cpp"
    if not original.is_dir():
        pytest.skip("no source of llama.cpp")
    for path in original.rglob("*.py"):
        copy = tmp_path / "llama.cpp" / path.relative_to(original)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.write_text(copy.read_text().replace(UNKNOWN, 'res = "gpt-2"'))
    return tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"


@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_converted_export_has_the_same_logits(make_run, converter, tmp_path, shape):
    import llama_cpp

    run = make_run(shape, SHAPES[shape] | {"vocab_size": 320})
    tokenizer = make_tokenizer("train:300", lambda _: [TEXT])
    export_run(replace(open_source(run), tokenizer=tokenizer), tmp_path / "hf", "huggingface")
    file = tmp_path / "model.gguf"
    words = [sys.executable, str(converter), str(tmp_path / "hf"), "--outtype", "f32"]
    subprocess.run([*words, "--outfile", str(file)], check=True)
    llama = llama_cpp.Llama(str(file), n_ctx=16, logits_all=True, verbose=False, n_gpu_layers=0)
    ids = llama.tokenize(b"the run ends", add_bos=False)
    assert ids == tokenizer.encode("the run ends")
    llama.eval(ids)
    with torch.no_grad():
        wanted = load_run(run, "last", device="cpu").model.logits(torch.tensor([ids]))[0]
    found = torch.tensor(np.array(llama.scores[: len(ids)]))
    # llama.cpp keeps the cache of keys and values in fp16
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
