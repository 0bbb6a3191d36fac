"""Attention that computes, or keeps, less: patterns, hashing, features, low rank, shared heads, a bounded cache.

masks.py       who may look at whom, as functions that compose; path lengths
blocks.py      the same patterns in forms whose work shrinks: windows, squares, columns, dilated gathers
reformer.py    buckets of similar vectors; layers that recompute their inputs
lowrank.py     Linformer and Nyströmformer
grouping.py    MHA to GQA and MQA, and the values that a cache keeps for a token
streaming.py   a cache of constant size with attention sinks

What models share with later chapters is in llmstack.ops: banded.py, merge.py and linear_attention.py (with FAVOR+).
"""
