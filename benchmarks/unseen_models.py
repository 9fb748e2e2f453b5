"""Training steps of twelve more families of transformers, to hold predictions against: none was used to adjust the model.

    flopwise tune benchmarks/unseen_models.py:pythia --budget 150s

Random weights from configs, random tokens, plain AdamW, the loss of `labels=`; dropout off.
"""

from collections.abc import Callable

import torch
from user_models import Step, hf_step


def causal(device: torch.device, config: object, batch: int, context: int) -> Step:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    return hf_step(model, device, config.vocab_size, batch, context)  # type: ignore[attr-defined]


def pythia(device: torch.device, batch: int = 8, context: int = 1024) -> Step:
    """The size of Pythia 410M: parallel attention and MLP, rotary on a quarter of a head."""
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=50_304
    )
    return causal(device, config, batch, context)


def opt(device: torch.device, batch: int = 16, context: int = 512) -> Step:
    """The size of OPT 125M: learned positions, ReLU, biases."""
    from transformers import OPTConfig

    return causal(device, OPTConfig(dropout=0.0), batch, context)


def qwen2(device: torch.device, batch: int = 4, context: int = 1024) -> Step:
    """The size of Qwen2 0.5B: biases on q, k, v; seven queries to a key; a tied head."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    return causal(device, config, batch, context)


def smollm(device: torch.device, batch: int = 4, context: int = 2048) -> Step:
    """The size of SmolLM 360M."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=960,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        intermediate_size=2560,
        vocab_size=49_152,
        tie_word_embeddings=True,
    )
    return causal(device, config, batch, context)


def mistral(device: torch.device, layers: int = 6, batch: int = 2, context: int = 2048) -> Step:
    """Layers as wide as Mistral 7B's."""
    from transformers import MistralConfig

    return causal(device, MistralConfig(num_hidden_layers=layers, sliding_window=None), batch, context)


def phi(device: torch.device, layers: int = 12, batch: int = 4, context: int = 1024) -> Step:
    """Layers as wide as Phi 1.5's: biases, a quarter of a head rotated, one norm for attention and MLP."""
    from transformers import PhiConfig

    return causal(device, PhiConfig(num_hidden_layers=layers), batch, context)


def olmo2(device: torch.device, layers: int = 8, batch: int = 4, context: int = 1024) -> Step:
    """Layers as wide as OLMo 2 1B's: norms after attention and MLP, on q and k."""
    from transformers import Olmo2Config

    config = Olmo2Config(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
        vocab_size=100_352,
    )
    return causal(device, config, batch, context)


def bert(device: torch.device, batch: int = 16, context: int = 512) -> Step:
    """BERT base, masked language model."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.device(device):
        model = BertForMaskedLM(config)
    return hf_step(model, device, config.vocab_size, batch, context)


def starcoder2(device: torch.device, layers: int = 10, batch: int = 2, context: int = 2048) -> Step:
    """Layers as wide as StarCoder2 3B's: 12 queries to a key, biases, LayerNorm, an MLP with GeLU."""
    from transformers import Starcoder2Config

    config = Starcoder2Config(
        num_hidden_layers=layers,
        sliding_window=None,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    return causal(device, config, batch, context)


def stablelm(device: torch.device, layers: int = 12, batch: int = 3, context: int = 1024) -> Step:
    """Layers as wide as StableLM 2 1.6B's: LayerNorm, SwiGLU, a quarter of a head rotated."""
    from transformers import StableLmConfig

    config = StableLmConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=100_352,
    )
    return causal(device, config, batch, context)


def falcon(device: torch.device, batch: int = 5, context: int = 1024) -> Step:
    """The size of Falcon-RW-1B's layers, twelve of them: attention and MLP side by side, one key for all queries."""
    from transformers import FalconConfig

    config = FalconConfig(
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=32,
        multi_query=True,
        alibi=False,
        parallel_attn=True,
    )
    return causal(device, config, batch, context)


def t5(device: torch.device, batch: int = 12, context: int = 512) -> Step:
    """T5 base: an encoder and a decoder, relative positions added to the scores, no scale."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        vocab_size=32_128,
    )
    with torch.device(device):
        model = T5ForConditionalGeneration(config)
    return hf_step(model, device, config.vocab_size, batch, context)


MODELS: dict[str, Callable[..., Step]] = {
    one.__name__: one
    for one in (pythia, opt, qwen2, smollm, mistral, phi, olmo2, bert, starcoder2, stablelm, falcon, t5)
}
