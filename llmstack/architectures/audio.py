"""Sound for Whisper: a WAV file, its log-mel spectrogram, and the words that the model hears in it.

A second is 16,000 samples; a frame every 160 of them (10 ms) looks at 400 (25 ms) under a Hann window. Its power
spectrum [201] is summed into 80 bands that are even on the mel scale, as the ear hears pitch: linear to 1 kHz and
logarithmic above (Slaney's), triangles of equal area. Then log10, everything under the loudest by more than 8 (80 dB)
raised to that, and (x + 4) / 4. Thirty seconds give [80, 3000]; a convolution of stride 2 leaves 1500 positions.

Source: Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision (arXiv 2212.04356), section 2.2.
"""

from __future__ import annotations

import wave
from functools import cache
from pathlib import Path

import numpy as np

SAMPLE_RATE, WINDOW, HOP, SECONDS = 16000, 400, 160, 30


def read_wav(path: str | Path) -> np.ndarray:
    """Samples of a mono 16 kHz WAV file of 8 or 16 bits, fp32 [n] in -1 to 1. Raises ValueError for another kind."""
    try:
        with wave.open(str(path)) as f:
            rate, channels, width, data = (
                f.getframerate(),
                f.getnchannels(),
                f.getsampwidth(),
                f.readframes(f.getnframes()),
            )
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{Path(path).name} is not a plain WAV file ({error or 'it ends in its head'})") from None
    if (rate, channels) != (SAMPLE_RATE, 1) or width not in (1, 2):
        raise ValueError(
            f"{Path(path).name} has {channels} channel(s) of {8 * width} bits at {rate} Hz; Whisper hears one of "
            f"8 or 16 bits at {SAMPLE_RATE} Hz. Convert it: sox {Path(path).name} -r 16000 -c 1 -b 16 out.wav"
        )
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    return np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / 32768


@cache
def mel_filters(n_mels: int = 80, n_fft: int = WINDOW, rate: int = SAMPLE_RATE) -> np.ndarray:
    """Triangular bands on Slaney's mel scale, each of unit area in Hz, fp64 [n_mels, n_fft/2 + 1]."""
    step = np.log(6.4) / 27  # 27 steps from 1 kHz to 6.4 kHz
    to_mel = lambda f: 3 * f / 200 if f < 1000 else 15 + np.log(f / 1000) / step
    mel = np.linspace(0, to_mel(rate / 2), n_mels + 2)
    edges = np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(step * (mel - 15)))[:, None]  # Hz, [n_mels + 2, 1]
    hertz = np.arange(n_fft // 2 + 1) * rate / n_fft
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


def log_mel(samples: np.ndarray, n_mels: int = 80, seconds: float = SECONDS) -> np.ndarray:
    """Samples [n] at 16 kHz -> fp32 [n_mels, 100 seconds]; silence fills up, and what is longer is cut off."""
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1:
        raise ValueError(f"samples have shape {list(samples.shape)}, but one channel is a vector: [n]")
    length = int(seconds * SAMPLE_RATE)
    samples = np.pad(samples[:length], (0, max(0, length - len(samples))))
    samples = np.pad(samples, WINDOW // 2, mode="reflect")  # so that frame i is centred on sample 160 i
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP][: length // HOP]  # [frames, 400]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2  # [frames, 201]
    loudness = np.log10(np.maximum(mel_filters(n_mels) @ power.T, 1e-10))
    return ((np.maximum(loudness, loudness.max() - 8) + 4) / 4).astype(np.float32)
