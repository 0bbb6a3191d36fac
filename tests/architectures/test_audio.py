"""The log-mel front end against transformers' WhisperFeatureExtractor, and files that are not what they should be."""

import wave

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from llmstack import facts
from llmstack.architectures.audio import log_mel, mel_filters, read_wav

CLIP = facts.data_path() / "audio" / "moon.wav"


@pytest.fixture(scope="module")
def theirs():
    return WhisperFeatureExtractor()


def sounds():
    t = np.arange(16000) / 16000
    rng = np.random.default_rng(0)
    return {
        "clip": read_wav(CLIP),
        "silence": np.zeros(4000, np.float32),
        "tone": np.sin(2 * np.pi * 440 * t).astype(np.float32),
        "noise": rng.uniform(-1, 1, 7001).astype(np.float32),
        "one sample": np.ones(1, np.float32),
        "too long": rng.uniform(-1, 1, 31 * 16000).astype(np.float32),
    }


def test_mel_filters(theirs):
    np.testing.assert_allclose(mel_filters(), theirs.mel_filters.T, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", sounds())
def test_log_mel(theirs, kind):
    """transformers has a front end in NumPy (fp64) and one in torch (fp32), which differ by some 3e-5 of each other."""
    sound = sounds()[kind]
    whole = np.pad(sound, (0, max(0, 480000 - len(sound))))[None, :480000]
    got = log_mel(sound)
    assert got.shape == (80, 3000) and got.dtype == np.float32
    np.testing.assert_allclose(got, theirs._np_extract_fbank_features(whole, "cpu")[0], rtol=0, atol=1e-5)
    in_fp32 = theirs(sound, sampling_rate=16000, return_tensors="np").input_features[0]
    np.testing.assert_allclose(got, in_fp32, rtol=0, atol=2e-4)


def test_a_tone_is_loudest_in_its_own_band():
    loudest = log_mel(sounds()["tone"])[:, 50].argmax()
    assert mel_filters()[loudest].argmax() * 40 == 440  # bins are 40 Hz apart


def write(path, width, rate=16000, channels=1, data=b"\x00\x40\xff\x7f"):
    with wave.open(str(path), "w") as f:
        f.setparams((channels, width, rate, 0, "NONE", ""))
        f.writeframes(data)
    return path


def test_samples_of_8_and_16_bits(tmp_path):
    np.testing.assert_array_equal(read_wav(write(tmp_path / "a.wav", 2)), np.float32([0.5, 32767 / 32768]))
    np.testing.assert_array_equal(read_wav(write(tmp_path / "b.wav", 1)), np.float32([-1, -0.5, 127 / 128, -1 / 128]))


def test_the_clip_is_as_its_note_says():
    note = facts.table("audio/moon")
    assert len(read_wav(CLIP)) == note["seconds"] * 16000
    assert CLIP.stat().st_size <= 100_000


@pytest.mark.parametrize(
    "kind, says",
    [
        ("rate", "at 8000 Hz"),
        ("stereo", "2 channel"),
        ("wide", "24 bits"),
        ("text", "not a plain WAV"),
        ("cut", "not a plain WAV"),
    ],
)
def test_what_it_cannot_hear(tmp_path, kind, says):
    path = tmp_path / "x.wav"
    if kind == "text":
        path.write_text("hello")
    elif kind == "cut":
        path.write_bytes(CLIP.read_bytes()[:10])
    else:
        channels, width = (2 if kind == "stereo" else 1), (3 if kind == "wide" else 2)
        write(path, width, 8000 if kind == "rate" else 16000, channels, bytes(12))
    with pytest.raises(ValueError, match=says):
        read_wav(path)


def test_channels_are_refused():
    with pytest.raises(ValueError, match="one channel"):
        log_mel(np.zeros((2, 100)))
