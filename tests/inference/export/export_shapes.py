"""Shapes of models to export, as keys under `model.`."""

SHAPES = {
    "gpt2": {"positions": "learned", "bias": True},
    "gpt2-without-biases": {"positions": "learned", "tied_head": False},
    "gpt-neox": {
        "bias": True,
        "rotary_dims": 8,
        "parallel_residual": True,
        "activation": "gelu_exact",
        "tied_head": False,
    },
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 1, "tied_head": False},
    "llama3": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "rotary_scaling": "llama3",
        "rotary_factor": 8.0,
        "rotary_original_len": 8,
    },
    "mistral": {"norm": "rmsnorm", "activation": "swiglu", "window": 5},
    "qwen2": {"norm": "rmsnorm", "activation": "swiglu", "qkv_bias": True},
    "qwen3": {"norm": "rmsnorm", "activation": "swiglu", "qk_norm": True, "head_dim": 24},
}
"""Keys under `model.` of shapes that a class of transformers has."""
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt2-without-biases": "GPT2LMHeadModel",
    "gpt-neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama3": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EIGENSTATE = {"kind": "eigenstate", "num_eigenstates": 8}
OWN_SHAPES = {
    "relu2": {"activation": "relu2", "bias": True},
    "mix": {
        "norm": "rmsnorm",
        "positions": "learned",
        "activation": "geglu",
        "logit_softcap": 5.0,
        "logit_scale": 0.5,
        "qk_norm": True,
        "num_kv_heads": 1,
        "tied_head": False,
    },
    "rotary-mix": {
        "activation": "swiglu",
        "rotary_scaling": "linear",
        "rotary_factor": 2.0,
        "rotary_dims": 8,
        "window": 5,
        "full_attention_every": 2,
        "parallel_residual": True,
    },
    "eigenstate": EIGENSTATE,
    "eigenstate-untied": {**EIGENSTATE, "bias": True, "tied_head": False},
    "eigenstate-learned": {**EIGENSTATE, "positions": "learned", "logit_softcap": 5.0},
}
"""Keys of shapes that no class of transformers has."""
