"""Every family against transformers with the same random weights: logits, hidden states, parameters, files."""

import pytest
import torch
from peers import DECODERS, ENCODERS, TWO_SIDED, close, ids_of, padded, peer, positions, takes

from llmstack.architectures import build, load, save
from llmstack.architectures.hf import config_from_hf

INPUTS = [(3, 13, "none"), (3, 13, "right"), (3, 13, "left"), (1, 13, "none"), (1, 1, "none")]


def pairs(families):
    @pytest.fixture(scope="module", params=families)
    def pair(request, tmp_path_factory):
        theirs = peer(families[request.param])
        folder = tmp_path_factory.mktemp("theirs")
        theirs.save_pretrained(folder)
        return theirs, load(folder)

    return pair


decoders, encoders, two_sided = pairs(DECODERS), pairs(ENCODERS), pairs(TWO_SIDED)


@torch.no_grad()
@pytest.mark.parametrize("B, T, side", INPUTS)
def test_decoder(decoders, B, T, side):
    theirs, ours = decoders
    ids, real = ids_of(B, T), padded(B, T, side)
    more = {"position_ids": positions(real)} if takes(theirs, "position_ids") else {}
    want = theirs(ids, attention_mask=real.long(), output_hidden_states=True, **more)
    padding = None if side == "none" else real
    close(ours(ids, padding), want.logits, real)
    for mine, other in zip(ours.hidden_states(ids, padding), want.hidden_states, strict=True):
        if mine.shape == other.shape:  # OPT-350m's last is already projected to the embedding's width
            close(mine, other, real)


@torch.no_grad()
@pytest.mark.parametrize("B, T, side", INPUTS)
def test_encoder(encoders, B, T, side):
    theirs, ours = encoders
    ids, real, types = ids_of(B, T), padded(B, T, side), ids_of(B, T, V=2)
    tasks = ids_of(B, T, V=3) if ours.config.task_types else None
    more = {} if tasks is None else {"task_type_ids": tasks}
    more |= dict(token_type_ids=types, position_ids=positions(real), output_hidden_states=True)
    want = theirs(ids, attention_mask=real.long(), **more)
    states = ours.hidden_states(ids, None if side == "none" else real, types, tasks)
    for mine, other in zip(states, want.hidden_states, strict=True):
        close(mine, other, real)
    if ours.config.pooler and side != "left":  # transformers pools column 0, padding or not
        pooled = ours.pooled(states[-1], real)
        if ours.config.mlm:
            close(ours.next_sentence(pooled), want.seq_relationship_logits)
        else:
            close(pooled, want.pooler_output)
    if ours.config.mlm:
        close(ours.masked_logits(states[-1]), want.prediction_logits if ours.config.pooler else want.logits, real)


@torch.no_grad()
@pytest.mark.parametrize("B, T, side", INPUTS)
def test_encoder_decoder(two_sided, B, T, side):
    theirs, ours = two_sided
    sound, marian = ours.config.n_mels, ours.config.model_type == "marian"
    if marian and side == "left":
        pytest.skip("transformers' Marian takes no positions, and counts padding on the left as tokens")
    ids, real = ids_of(B, T), padded(B, T, side)
    source = torch.randn(B, 8, 24, generator=torch.Generator().manual_seed(2)) if sound else ids_of(B, T + 3, seed=3)
    source_real = None if sound else padded(B, T + 3, side)
    more = {} if sound else {"attention_mask": source_real.long()}
    more |= {"decoder_position_ids": positions(real)} if takes(theirs, "decoder_position_ids") else {}
    want = theirs(source, decoder_input_ids=ids, decoder_attention_mask=real.long(), output_hidden_states=True, **more)
    paddings = (None, None) if side == "none" else (source_real, real)
    close(ours(source, ids, *paddings), want.logits, real)
    encoder, decoder = ours.hidden_states(source, ids, *paddings)
    for mine, other in zip(encoder, want.encoder_hidden_states, strict=True):
        close(mine, other, source_real)
    for mine, other in zip(decoder, want.decoder_hidden_states, strict=True):
        close(mine, other, real)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, *TWO_SIDED])
def test_parameters_and_files_in_both_directions(family, tmp_path):
    """The counts are transformers', and transformers reads what we save as it was."""
    theirs = peer((DECODERS | ENCODERS | TWO_SIDED)[family])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    count = lambda model: sum(p.numel() for p in model.parameters())
    # Marian keeps its sinusoids as two fixed tables, and the bias of its logits as a buffer
    extra = 2 * 1024 * 32 - 99 if family == "marian" else 0
    assert count(ours) == count(build(ours.config, device="meta")) == count(theirs) - extra
    save(ours, tmp_path / "ours")
    back = type(theirs).from_pretrained(tmp_path / "ours")
    assert set(back.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = load(tmp_path / "ours")
    assert again.config.with_(name="") == ours.config.with_(name="")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters()))


def test_whispers_sinusoids_are_built_as_it_builds_them():
    from transformers.models.whisper.modeling_whisper import sinusoids

    ours = build(config_from_hf(TWO_SIDED["whisper"]().config.to_dict()))
    torch.testing.assert_close(ours.frontend.positions.weight, sinusoids(12, 32))
    assert not ours.frontend.positions.weight.requires_grad


@pytest.mark.parametrize("style", ["rope_theta", "rope_parameters"])
def test_rope_is_read_in_both_spellings(style, tmp_path):
    """Files of transformers 4 say rope_theta and rope_scaling, those of 5 rope_parameters."""
    import json

    theirs = peer(DECODERS["llama-3.1"])
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    turns = raw.pop("rope_parameters")
    if style == "rope_theta":
        raw |= {"rope_theta": turns.pop("rope_theta"), "rope_scaling": turns}
    else:
        raw["rope_parameters"] = turns
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = load(tmp_path)
    assert ours.config.rope_theta == 500000.0 and ours.config.rope_scaling == (8.0, 1.0, 4.0, 16)
    ids = ids_of(1, 40)
    with torch.no_grad():
        close(ours(ids), theirs(ids).logits)
