"""Small models of transformers with random weights, one of every family: what ours are held against."""

import inspect
import logging

import torch
import transformers as t

logging.getLogger("transformers").setLevel(logging.ERROR)
t.utils.logging.set_verbosity_error()
t.utils.logging.disable_progress_bar()

ENDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **ENDS)
GPT = dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ENDS)
WIDE = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **ENDS)
BERT = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
T5 = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
T5 |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=12)
SIDES = dict(vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4)
SIDES |= dict(decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, forced_eos_token_id=None)
SIDES |= dict(pad_token_id=98, eos_token_id=0, bos_token_id=1, decoder_start_token_id=98)
LLAMA31 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA31 |= dict(original_max_position_embeddings=16)

DECODERS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "llama-gqa": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, num_key_value_heads=2, head_dim=16)),
    "llama-biases": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "llama-3.1": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, num_key_value_heads=2, rope_parameters=LLAMA31)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True)),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=5)),
    "arcee-relu": lambda: t.ArceeForCausalLM(t.ArceeConfig(**LLAMA, num_key_value_heads=2, hidden_act="relu")),
    "gpt1": lambda: t.OpenAIGPTLMHeadModel(t.OpenAIGPTConfig(**GPT)),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT)),
    "gptj": lambda: t.GPTJForCausalLM(t.GPTJConfig(**GPT, rotary_dim=4)),
    "gpt-neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**WIDE, intermediate_size=48)),
    "gpt-neox-sequential": lambda: t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**WIDE, intermediate_size=48, use_parallel_residual=False, rotary_pct=0.5)
    ),
    "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**WIDE, ffn_dim=48, max_position_embeddings=64)),
    "opt-350m": lambda: t.OPTForCausalLM(
        t.OPTConfig(**WIDE, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=16, do_layer_norm_before=False)
    ),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=99, hidden_size=24, n_layer=2, n_head=6, **ENDS)),
    "falcon-7b": lambda: t.FalconForCausalLM(t.FalconConfig(**WIDE)),
    "falcon-40b": lambda: t.FalconForCausalLM(t.FalconConfig(**WIDE, num_kv_heads=2, new_decoder_architecture=True)),
}
ENCODERS = {
    "bert": lambda: t.BertModel(t.BertConfig(**BERT)),
    "bert-mlm": lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
    "bert-pretraining": lambda: t.BertForPreTraining(t.BertConfig(**BERT)),
    "ernie": lambda: t.ErnieModel(t.ErnieConfig(**BERT)),
    "ernie-tasks": lambda: t.ErnieForMaskedLM(t.ErnieConfig(**BERT, use_task_id=True, task_type_vocab_size=3)),
}
TWO_SIDED = {
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "t5-v1.1": lambda: untied(t.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "marian": lambda: t.MarianMTModel(t.MarianConfig(**SIDES, scale_embedding=True, activation_function="relu")),
    "whisper": lambda: t.WhisperForConditionalGeneration(
        t.WhisperConfig(**SIDES, num_mel_bins=8, max_source_positions=12, max_target_positions=20)
    ),
}


def untied(config):
    """T5 v1.1 has a head of its own, which transformers 5 ties unless a checkpoint holds both."""
    model = t.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, config.d_model) / 6)
    return model


def peer(make, seed=0):
    """The model with every weight, bias and norm moved away from what it starts as."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if p.requires_grad or name == "final_logits_bias":
                p += 0.1 * torch.randn_like(p)
    return model


def padded(B, T, side):
    """Which of [B, T] tokens are real: rows of different lengths, the first one full."""
    real = torch.ones(B, T, dtype=torch.bool)
    for b in range(1, B):
        if side == "left":
            real[b, : 2 * b] = False
        if side == "right":
            real[b, T - 2 * b :] = False
    return real


def positions(real):
    return (real.long().cumsum(-1) - 1).clamp(min=0)


def ids_of(B, T, V=99, seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def takes(model, argument):
    return argument in inspect.signature(model.forward).parameters


def close(ours, theirs, real=None, tolerance=1e-5):
    """Equal at real tokens to `tolerance` of the largest magnitude."""
    if real is not None:
        ours, theirs = ours[real], theirs[real]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


# families that differ from one above by a dial or two
GQA = dict(**LLAMA, num_key_value_heads=2)
PHI3 = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, short_factor=[1.0, 1.5])
PHI3 |= dict(long_factor=[2.0, 4.0], original_max_position_embeddings=8)
GRANITE = dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.2)
DECODERS |= {
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**GQA, head_dim=16)),
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**GQA)),
    "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**GQA, **GRANITE)),
    "smollm3": lambda: t.SmolLM3ForCausalLM(t.SmolLM3Config(**GQA, no_rope_layer_interval=2)),
    "phi3": lambda: t.Phi3ForCausalLM(
        t.Phi3Config(
            **GQA,
            rope_parameters=PHI3,
            max_position_embeddings=16,
            original_max_position_embeddings=8,
            sliding_window=5,
        )
    ),
}
ROBERTA = {
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**BERT, max_position_embeddings=66, pad_token_id=1)),
    "roberta-mlm": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**BERT, max_position_embeddings=66, pad_token_id=1)),
}
TWO_SIDED["mt5"] = lambda: t.MT5ForConditionalGeneration(t.MT5Config(**T5))
