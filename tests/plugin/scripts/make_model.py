"""Write a tiny random Llama (or another family's) folder: python make_model.py FOLDER [JSON].

The JSON changes config.json. Biases on q and k add to the scores a part that depends on the
distance alone and falls with it (one rotary pair): blocks far from the diagonal can be skipped.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 512
HIDDEN = 256
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 2
ROTARY_PAIR = 19
STRENGTH = {0: 30.0, 1: 6.0}
"""Per kv head: score of a query with its own position, natural units."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}


def position_bias(heads: int) -> torch.Tensor:
    """Bias of q or k: `heads` heads whose product with the other's falls with the distance."""
    bias = torch.zeros(heads, HEAD_DIM)
    for head in range(heads):
        strength = STRENGTH[head * KV_HEADS // heads]
        bias[head, ROTARY_PAIR] = math.sqrt(strength * math.sqrt(HEAD_DIM))
    return bias.flatten()


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    # 0.08, not the usual 0.02: attention has structure, and greedy tokens have no near ties.
    def rand(*shape: int) -> torch.Tensor:
        return 0.08 * torch.randn(*shape)

    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": rand(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": rand(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": rand(q_size, HIDDEN),
            f"{at}.self_attn.k_proj.weight": rand(kv_size, HIDDEN),
            f"{at}.self_attn.v_proj.weight": rand(kv_size, HIDDEN),
            f"{at}.self_attn.o_proj.weight": rand(HIDDEN, q_size),
            f"{at}.self_attn.q_proj.bias": position_bias(HEADS),
            f"{at}.self_attn.k_proj.bias": position_bias(KV_HEADS),
            f"{at}.self_attn.v_proj.bias": torch.zeros(kv_size),
            f"{at}.self_attn.o_proj.bias": torch.zeros(HIDDEN),
            f"{at}.mlp.gate_proj.weight": rand(2 * HIDDEN, HIDDEN),
            f"{at}.mlp.up_proj.weight": rand(2 * HIDDEN, HIDDEN),
            f"{at}.mlp.down_proj.weight": rand(HIDDEN, 2 * HIDDEN),
        }
    return tensors


def tokenizer() -> Tokenizer:
    """Byte-level without merges: one token a byte."""
    alphabet = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return tok


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    changes = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if not changes:
        save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
