"""What a folder's tensors say of shared tables and of heads, against what transformers makes of the same folder."""

import json

import pytest
import torch
import transformers as t
from peers import BERT, DECODERS, ENCODERS, ROBERTA, SIDES, T5, TWO_SIDED, close, ids_of, padded, peer
from safetensors.torch import load_file, save_file

from llmstack.architectures import load, save
from llmstack.architectures.hf import CheckpointError

SWITCH = dict(**T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
TIED = {name: DECODERS[name] for name in ("gpt2", "qwen2", "opt", "bloom", "falcon-7b")}
TIED |= {name: TWO_SIDED[name] for name in ("t5", "marian", "whisper")}
TIED["switch"] = lambda: t.SwitchTransformersForConditionalGeneration(t.SwitchTransformersConfig(**SWITCH))
TIED["mamba"] = lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1))


def rewrite(folder, change=None, **config):
    """Change a folder's config.json, and its tensors by a function of their dictionary."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def logits(model):
    ids, config = ids_of(2, 7), model.config
    theirs = isinstance(model, t.PreTrainedModel)
    if getattr(config, "n_mels", 0) or getattr(config, "num_mel_bins", 0):
        source = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2))
    else:
        source = ids_of(2, 9, seed=3)
    two_sided = config.is_encoder_decoder if theirs else config.kind == "encoder-decoder"
    if theirs:
        return model(source, decoder_input_ids=ids).logits if two_sided else model(ids).logits
    return model(source, ids) if two_sided else model(ids)


@pytest.mark.parametrize("family", TIED)
def test_a_head_that_the_file_holds_is_used_and_kept(family, tmp_path):
    """config.json says tied; transformers 5 ties only what is alike."""
    theirs = peer(TIED[family])
    theirs.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(theirs.get_output_embeddings().weight.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", tie_word_embeddings=True)
    want = type(theirs).from_pretrained(tmp_path / "theirs").eval()
    ours = load(tmp_path / "theirs")
    assert not ours.config.tied
    close(logits(ours), logits(want))
    save(ours, tmp_path / "ours")
    close(logits(load(tmp_path / "ours")), logits(want))
    close(logits(type(theirs).from_pretrained(tmp_path / "ours").eval()), logits(want))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_one_table_under_either_name_or_both_is_one(family, tmp_path):
    theirs = peer(TIED[family])
    theirs.save_pretrained(tmp_path)
    table = {"gpt2": "transformer.wte.weight", "t5": "shared.weight"}[family]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[table].clone()}))
    both = load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(table))
    for ours in (both, load(tmp_path)):
        assert ours.config.tied and ours.out.head.weight is ours.embed.tokens.weight
        close(logits(ours), logits(theirs))


@pytest.mark.parametrize("family", ["llama", "t5-v1.1"])
def test_a_head_that_is_missing_where_none_is_tied_is_refused_or_tied_as_t5_is(family, tmp_path):
    theirs = peer((DECODERS | TWO_SIDED)[family])
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=False)
    if family == "llama":
        with pytest.raises(CheckpointError, match="lacks lm_head.weight"):
            load(tmp_path)
    else:
        close(logits(load(tmp_path)), logits(type(theirs).from_pretrained(tmp_path).eval()))


def test_a_head_replaced_after_training_is_saved(tmp_path):
    ours = load_of(DECODERS["qwen2"], tmp_path)
    ours.out.head.weight = torch.nn.Parameter(torch.randn_like(ours.out.head.weight))
    save(ours, tmp_path / "ours")
    theirs = t.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    close(logits(load(tmp_path / "ours")), logits(ours))
    close(logits(theirs), logits(ours))
    ours.out.head.weight = ours.embed.tokens.weight
    save(ours, tmp_path / "ours")
    assert load(tmp_path / "ours").config.tied


def load_of(make, folder):
    peer(make).save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_t5_ties_and_scales_apart(tied, scaled, tmp_path):
    theirs = peer(TWO_SIDED["t5" if tied else "t5-v1.1"])
    theirs.config.scale_decoder_outputs = scaled
    theirs.save_pretrained(tmp_path / "theirs")
    want = type(theirs).from_pretrained(tmp_path / "theirs").eval()
    ours = load(tmp_path / "theirs")
    assert ours.config.tied is tied and (ours.config.head_scale != 1.0) is scaled
    close(logits(ours), logits(want))
    save(ours, tmp_path / "ours")
    close(logits(type(theirs).from_pretrained(tmp_path / "ours").eval()), logits(want))


def test_another_shared_table_of_its_own_is_refused(tmp_path):
    peer(TWO_SIDED["t5"]).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"encoder.embed_tokens.weight": torch.ones(99, 32)}))
    with pytest.raises(
        CheckpointError, match="encoder.embed_tokens.weight and shared.weight differ.*tie_word_embeddings"
    ):
        load(tmp_path)


@torch.no_grad()
def test_of_berts_two_biases_the_heads_own_counts(tmp_path):
    peer(ENCODERS["bert-mlm"]).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"cls.predictions.decoder.bias": torch.ones(99)}))
    ours, theirs = load(tmp_path), t.BertForMaskedLM.from_pretrained(tmp_path).eval()
    close(ours.masked_logits(ours(ids_of(2, 9))), theirs(ids_of(2, 9)).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ROBERTA)
def test_roberta(name, tmp_path):
    """Positions count from 2, after two rows that stand for padding."""
    theirs = peer(ROBERTA[name])
    theirs.save_pretrained(tmp_path / "theirs")
    ours, ids = load(tmp_path / "theirs"), ids_of(2, 13) % 90 + 5
    real = padded(2, 13, "left")
    want = theirs(ids.masked_fill(~real, 1), attention_mask=real.long(), output_hidden_states=True)
    states = ours.hidden_states(ids.masked_fill(~real, 1), real)
    for mine, other in zip(states, want.hidden_states, strict=True):
        close(mine, other, real)
    if name == "roberta-mlm":
        close(ours.masked_logits(states[-1]), want.logits, real)
    save(ours, tmp_path / "ours")
    back = type(theirs).from_pretrained(tmp_path / "ours").eval()
    close(back(ids, output_hidden_states=True).hidden_states[-1], ours(ids))


def test_marians_two_vocabularies_are_refused_by_name(tmp_path):
    apart = t.MarianConfig(**SIDES, share_encoder_decoder_embeddings=False, decoder_vocab_size=99)
    peer(lambda: t.MarianMTModel(apart)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="share_encoder_decoder_embeddings = False"):
        load(tmp_path)


@pytest.mark.parametrize("stated", [None, ["BertForMaskedLM"], ["BertForPreTraining"], ["BertModel"]])
def test_berts_published_layout_loads_with_the_heads_that_it_holds(stated, tmp_path):
    theirs = peer(ENCODERS["bert-pretraining"])
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, architectures=stated)
    ours = load(tmp_path)
    want = theirs(ids_of(2, 9), output_hidden_states=True)
    states = ours.hidden_states(ids_of(2, 9))
    close(states[-1], want.hidden_states[-1])
    close(ours.masked_logits(states[-1]), want.prediction_logits)
    close(ours.next_sentence(ours.pooled(states[-1])), want.seq_relationship_logits)


@pytest.mark.parametrize("task", ["SequenceClassification", "QuestionAnswering", "TokenClassification"])
def test_an_encoder_with_a_task_head_loads_without_it_and_says_so(task, tmp_path):
    theirs = peer(lambda: getattr(t, f"BertFor{task}")(t.BertConfig(**BERT)))
    theirs.save_pretrained(tmp_path)
    left = "qa_outputs" if task == "QuestionAnswering" else "classifier"
    with pytest.warns(UserWarning, match=f"{left}.bias, {left}.weight left out"):
        ours = load(tmp_path)
    assert not ours.config.mlm and ours.config.pooler is (task == "SequenceClassification")
    close(ours(ids_of(2, 9)), theirs.bert(ids_of(2, 9)).last_hidden_state)


def test_a_part_of_an_encoders_trunk_is_no_task_head(tmp_path):
    peer(ENCODERS["bert"]).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"encoder.layer.0.gate.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match="holds encoder.layer.0.gate.weight"):
        load(tmp_path)


def test_dtype_takes_a_name(tmp_path):
    peer(DECODERS["llama"]).save_pretrained(tmp_path)
    assert load(tmp_path, dtype="bfloat16").embed.tokens.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype = 'int8', but weights are floating point: 'float32', 'bfloat16'"):
        load(tmp_path, dtype="int8")
