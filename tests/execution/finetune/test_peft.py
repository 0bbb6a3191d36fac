"""Held against PEFT on the same weights: outputs, gradients, training. The one module that imports it (13 s)."""

import copy

import pytest
import torch

from llmstack.architectures import load
from llmstack.execution.finetune import prepare
from llmstack.execution.finetune.prompts import materialise

L, D, H, K, DH, V, N = 2, 32, 4, 2, 8, 99, 5  # N: virtual tokens


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """peft, and of each architecture a way to make (theirs, ours) anew with equal weights."""
    import peft
    import transformers as t

    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    llama = dict(hidden_size=D, intermediate_size=48, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=K)
    gpt2 = dict(n_embd=D, n_layer=L, n_head=H, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    made = {
        "llama": t.LlamaForCausalLM(t.LlamaConfig(vocab_size=V, **llama, **ends)),
        "gpt2": t.GPT2LMHeadModel(t.GPT2Config(vocab_size=V, **gpt2, **ends)),
    }
    for name, model in made.items():
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
        model.save_pretrained(tmp_path_factory.getbasetemp() / name)
    make = lambda name: (copy.deepcopy(made[name]), load(tmp_path_factory.getbasetemp() / name))
    return peft, make


def batch(seed=1, B=3, T=7):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(V, (B, T), generator=draw)


def left_padded():
    real = torch.ones(3, 7, dtype=torch.bool)
    real[1, :2] = real[2, :4] = False
    return real


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def equal(ours, theirs, tolerance=1e-5):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@torch.no_grad()
def stir(parameters):
    """Move what starts at zero, so that a gradient flows through all of it."""
    rng = torch.Generator().manual_seed(3)
    for p in parameters:
        p += 0.05 * torch.randn(p.shape, generator=rng)


def test_lora(peers):
    """Outputs, gradients, 20 steps of training, and the merged model."""
    peft, make = peers
    theirs, ours = make("llama")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, config)
    tuned = prepare(ours, "lora", r=4, alpha=12.0, targets=("q", "v"))
    theirs_of = {}
    for name in tuned.trainable:  # blocks.0.attention.q.a
        _, layer, _, which, matrix = name.split(".")
        attention = theirs.base_model.model.model.layers[int(layer)].self_attn
        theirs_of[name] = getattr(getattr(attention, f"{which}_proj"), f"lora_{matrix.upper()}").default.weight
    stir(theirs_of.values())
    tuned.load({name: p.detach() for name, p in theirs_of.items()})
    assert tuned.count == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    equal(ours(batch()), theirs(batch()).logits)
    adam = [torch.optim.Adam(params, lr=1e-2) for params in (tuned.trainable.values(), theirs_of.values())]
    for step in range(20):
        ids = batch(step)
        losses = loss_of(ours(ids), ids), loss_of(theirs(ids).logits, ids)
        for loss, optimizer in zip(losses, adam):
            optimizer.zero_grad()
            loss.backward()
        if not step:
            for name, p in tuned.trainable.items():
                equal(p.grad, theirs_of[name].grad, 1e-4)
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4), step
        for optimizer in adam:
            optimizer.step()
    equal(tuned.merge()(batch()), theirs.merge_and_unload()(batch()).logits, 1e-3)


@pytest.mark.parametrize("hidden", [0, 16], ids=["table", "projected"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prefix_tuning(peers, name, hidden):
    """P-tuning v2 is PEFT's prefix tuning without a projection, or with one."""
    peft, make = peers
    theirs, ours = make(name)
    how = dict(prefix_projection=bool(hidden), encoder_hidden_size=hidden or None)
    theirs = peft.get_peft_model(theirs, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=N, **how))
    tuned = prepare(ours, "p-tuning-v2", length=N, hidden=hidden)
    encoder = theirs.prompt_encoder.default
    pairs = {"prompt.table": encoder.embedding.weight}
    if hidden:
        pairs |= {f"prompt.encoder.{n}": p for n, p in encoder.transform.named_parameters()}
    same_model(tuned, theirs, pairs)


def test_prompt_tuning(peers):
    peft, make = peers
    theirs, ours = make("gpt2")
    theirs = peft.get_peft_model(theirs, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=N))
    tuned = prepare(ours, "prompt", length=N)
    assert tuned.count == N * D
    same_model(tuned, theirs, {"prompt.table": theirs.prompt_encoder.default.embedding.weight})


@pytest.mark.parametrize("kind", ["lstm", "mlp"])
def test_p_tuning(peers, kind):
    peft, make = peers
    theirs, ours = make("llama")
    how = dict(encoder_reparameterization_type=kind.upper(), encoder_hidden_size=16, encoder_num_layers=2)
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=N, encoder_dropout=0.0, **how)
    theirs = peft.get_peft_model(theirs, config)
    tuned = prepare(ours, "p-tuning", length=N, encoder=kind, hidden=16)
    encoder, lstm = theirs.prompt_encoder.default, kind == "lstm"
    pairs = {"prompt.table": encoder.embedding.weight}
    if lstm:
        pairs |= {f"prompt.encoder.0.{n}": p for n, p in encoder.lstm_head.named_parameters()}
    for n, p in encoder.mlp_head.named_parameters():
        pairs[f"prompt.encoder.{int(n[0]) + lstm}{n[1:]}"] = p
    same_model(tuned, theirs, pairs)


def same_model(tuned, theirs, pairs):
    """The same trained values: equal outputs, with and without padding, and equal gradients of those values alone.
    Then the encoder's result in place of the encoder: the same outputs."""
    assert pairs.keys() == tuned.trainable.keys()
    assert tuned.count == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    stir(pairs.values())
    tuned.load({name: p.detach() for name, p in pairs.items()})
    ids, real = batch(), left_padded()
    logits = tuned.model(ids), theirs(ids, attention_mask=torch.ones_like(ids)).logits[:, -ids.shape[1] :]
    equal(*logits)
    for x in logits:
        loss_of(x, ids).backward()
    for name, p in tuned.trainable.items():
        equal(p.grad, pairs[name].grad, 1e-4)
    assert all(p.grad is None for n, p in tuned.model.named_parameters() if n not in tuned.trainable)
    with torch.no_grad():
        before = tuned.model(ids, padding=real)
        alone = tuned.model(ids[2:, 4:])  # what padding hides changes nothing
        equal(before[2:, 4:], alone)
        kept = materialise(tuned)
        assert list(kept.trainable) == ["prompt.table"]
        assert torch.equal(tuned.model(ids, padding=real), before)
